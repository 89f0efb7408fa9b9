"""Uploads a few times to a server that may refuse it early, and prints what each answer was: uploads.py PORT TRIALS.

As urllib3 does, it reads the answer although the connection was reset while it sent the request.
"""

import http.client
import sys

PORT, TRIALS = int(sys.argv[1]), int(sys.argv[2])
BODY = b"x" * 3_000_000

for _ in range(TRIALS):
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=20)
    try:
        connection.putrequest("POST", "/")
        connection.putheader("Content-Length", str(len(BODY)))
        try:
            connection.endheaders()
            connection.send(BODY)
        except (BrokenPipeError, ConnectionResetError):
            pass
        response = http.client.HTTPResponse(connection.sock, method="POST")
        response.begin()
        print(response.status, len(response.read()))
    except (OSError, http.client.HTTPException) as error:
        print(type(error).__name__)
    connection.close()
