"""A program that runs inside a session, as text: an HTTP server that remembers, switches protocols
and tells what it got, and a TCP echo."""

HTTP_PORT, TCP_PORT = 8000, 8002

PROGRAM = r"""
import hashlib, http.server, os, socket, socketserver, threading

count = 0

class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def answer(self, body, **headers):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        global count
        if self.headers.get("Upgrade") == "echo":
            self.send_response(101)
            self.send_header("Connection", "Upgrade")
            self.send_header("Upgrade", "echo")
            self.end_headers()
            self.wfile.flush()
            while data := self.connection.recv(65536):
                self.connection.sendall(data)
            self.close_connection = True
            return
        if self.path == "/count":
            count += 1
            self.answer(b"%d %d" % (count, os.getpid()))
        elif self.path == "/write":
            with open("/srv/written", "a") as file:
                file.write("more\n")
            self.answer(b"written")
        elif self.path == "/headers":
            self.answer(str(self.headers).encode())
        else:
            self.answer(b"hello")

    def do_POST(self):
        digest = hashlib.sha256()
        left = int(self.headers["Content-Length"])
        while left:
            data = self.rfile.read(min(left, 65536))
            digest.update(data)
            left -= len(data)
        self.answer(digest.hexdigest().encode())

def echo():
    with socket.create_server(("", 8002)) as server:
        while True:
            client, _ = server.accept()
            threading.Thread(target=serve, args=(client,), daemon=True).start()

def serve(client):
    while data := client.recv(65536):
        client.sendall(data)
    client.close()

threading.Thread(target=echo, daemon=True).start()
http.server.ThreadingHTTPServer.daemon_threads = True
http.server.ThreadingHTTPServer(("", 8000), Handler).serve_forever()
"""
