"""The site behind a decoy, for hypercorn: `GET /N` has N bytes, of which number i is i modulo 251."""

CHUNK = 16_384


async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        while True:
            message = await receive()
            await send({"type": message["type"] + ".complete"})
            if message["type"] == "lifespan.shutdown":
                return
    size = int(scope["path"].strip("/"))
    await send({"type": "http.response.start", "status": 200, "headers": [(b"server", b"a decoy")]})
    pattern = bytes(range(251)) * (CHUNK // 251 + 2)
    for start in range(0, size, CHUNK):
        length = min(CHUNK, size - start)
        body = pattern[start % 251 : start % 251 + length]
        await send({"type": "http.response.body", "body": body, "more_body": True})
    await send({"type": "http.response.body"})
