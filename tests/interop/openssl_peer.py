"""One TLS 1.3 connection over TCP by OpenSSL, which names its key exchange and echoes what comes.

    openssl_peer.py dial PORT        connects, sends "hello", expects it back
    openssl_peer.py listen           prints its port, and echoes once
"""

import datetime
import socket
import sys

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ed25519
from OpenSSL import SSL


def certificate():
    key = ed25519.Ed25519PrivateKey.generate()
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "openssl")])
    start = datetime.datetime(2000, 1, 1)
    made = x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
    made = made.serial_number(1).not_valid_before(start).not_valid_after(start.replace(year=2099))
    return key, made.sign(key, None)


def main():
    context = SSL.Context(SSL.TLS_METHOD)
    context.set_min_proto_version(SSL.TLS1_3_VERSION)
    # With SSL_VERIFY_NONE any certificate will do: the other end is the test.
    context.set_verify(SSL.VERIFY_NONE, lambda *_: True)
    if sys.argv[1] == "listen":
        key, cert = certificate()
        context.use_privatekey(key)
        context.use_certificate(cert)
        listener = socket.create_server(("127.0.0.1", 0))
        print(listener.getsockname()[1], flush=True)
        connection = SSL.Connection(context, listener.accept()[0])
        connection.set_accept_state()
        connection.do_handshake()
        connection.sendall(connection.recv(100))
    else:
        connection = SSL.Connection(context, socket.create_connection(("127.0.0.1", int(sys.argv[2]))))
        connection.set_connect_state()
        connection.do_handshake()
        connection.sendall(b"hello")
        assert connection.recv(100) == b"hello"
    print(connection.get_group_name(), flush=True)


main()
