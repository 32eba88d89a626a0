// Asks sparkd with Java's own client, which offers h2c with each request: java Ask.java URL KEY. Prints the status and the body.
import java.io.ByteArrayInputStream;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpRequest.BodyPublishers;
import java.net.http.HttpResponse.BodyHandlers;

class Ask {
    public static void main(String[] args) throws Exception {
        var body = "{\"model\": \"tiny\", \"messages\": [{\"role\": \"user\", \"content\": \"What is the capital of France?\"}]}".getBytes();
        var client = HttpClient.newHttpClient();
        for (var publisher : new HttpRequest.BodyPublisher[] {
                BodyPublishers.ofByteArray(body),
                BodyPublishers.ofInputStream(() -> new ByteArrayInputStream(body))}) { // of unknown length: chunked
            var request = HttpRequest.newBuilder(URI.create(args[0]))
                .header("Content-Type", "application/json").header("Authorization", "Bearer " + args[1]).POST(publisher).build();
            var answer = client.send(request, BodyHandlers.ofString());
            System.out.println(answer.statusCode() + " " + answer.body());
        }
    }
}
