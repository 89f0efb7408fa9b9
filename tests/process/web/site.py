"""The site behind the web server: h11 for HTTP/1.1, wsproto for WebSockets.

Usage: site.py PORT. It says what it was asked (/echo), sends N zeros (/zeros/N), closes in the middle (/half), and echoes WebSockets (/ws)."""

import asyncio
import json
import sys

import h11
import wsproto
from wsproto.events import AcceptConnection, BytesMessage, CloseConnection, Request, TextMessage


async def events(connection, reader):
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await reader.read(65536))
        else:
            yield event


async def websocket(reader, writer, request, rest):
    socket = wsproto.WSConnection(wsproto.ConnectionType.SERVER)
    lines = [request.method + b" " + request.target + b" HTTP/1.1"]
    lines += [name + b": " + value for name, value in request.headers]
    socket.receive_data(b"\r\n".join(lines) + b"\r\n\r\n" + rest)
    while True:
        for event in socket.events():
            if isinstance(event, Request):
                writer.write(socket.send(AcceptConnection()))
            elif isinstance(event, (TextMessage, BytesMessage)):
                writer.write(socket.send(event))
            elif isinstance(event, CloseConnection):
                writer.write(socket.send(event.response()))
                await writer.drain()
                return
        await writer.drain()
        data = await reader.read(65536)
        if not data:
            return
        socket.receive_data(data)


async def serve(reader, writer):
    connection = h11.Connection(h11.SERVER)
    request, body = None, bytearray()
    async for event in events(connection, reader):
        if isinstance(event, h11.Request):
            request = event
            if event.target == b"/ws" and (b"upgrade", b"websocket") in event.headers:
                await websocket(reader, writer, event, connection.trailing_data[0])
                writer.close()
                return
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage):
            break
        elif isinstance(event, h11.ConnectionClosed):
            writer.close()
            return
    path = request.target.decode()
    headers = [("x-site", "yes"), ("set-cookie", "a=1"), ("set-cookie", "b=2"), ("keep-alive", "timeout=5"),
               ("connection", "close, x-private"), ("x-private", "1")]
    if path.startswith("/zeros/"):
        content = bytes(int(path.split("/")[2]))
    else:
        content = json.dumps({
            "method": request.method.decode(), "path": path, "bytes": len(body), "sum": sum(body),
            "headers": [[name.decode(), value.decode()] for name, value in request.headers],
        }).encode()
    headers.append(("content-length", str(len(content) * (2 if path == "/half" else 1))))
    writer.write(connection.send(h11.Response(status_code=200, headers=headers)))
    if request.method != b"HEAD":
        for start in range(0, len(content), 65536):
            writer.write(connection.send(h11.Data(data=content[start:start + 65536])))
            try:
                await writer.drain()
            except ConnectionError:
                return
    writer.close()


async def guarded(reader, writer):
    try:
        await serve(reader, writer)
    except (ConnectionError, h11.RemoteProtocolError):
        writer.close()


async def main():
    server = await asyncio.start_server(guarded, "127.0.0.1", int(sys.argv[1]))
    async with server:
        await server.serve_forever()


asyncio.run(main())
