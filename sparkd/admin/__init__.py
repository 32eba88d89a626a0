"""The admin API: its application, its bodies and answers, its long operations, and its client."""
