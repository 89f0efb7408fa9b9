"""An HTTP server that refuses every upload without reading it, as many small servers do: refuses.py PORT BYTES."""

import http.server
import sys

PORT, BYTES = int(sys.argv[1]), int(sys.argv[2])


class Refuses(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = b"too much\n" * (BYTES // 9 + 1)
        self.send_response(413)
        self.send_header("Content-Length", str(BYTES))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(body[:BYTES])

    def log_message(self, *_):
        pass


http.server.ThreadingHTTPServer(("127.0.0.1", PORT), Refuses).serve_forever()
