document.body.textContent = "sparkd";
