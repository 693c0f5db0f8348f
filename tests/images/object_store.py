"""A server that behaves like S3, as far as stores of labels need it."""

import hashlib
import threading
import time
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

BUCKET = "bucket"


class LocalServer(ThreadingHTTPServer):
    """A server at a free port of this machine, which notes its requests."""

    daemon_threads = True

    def __init__(self, handler):
        super().__init__(("127.0.0.1", 0), handler)
        self.requests = []

    def handle_error(self, *_):
        """Say nothing of clients that went away or were killed."""

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class ObjectStore(LocalServer):
    """Objects in memory, by name; its behaviour is changed by tests."""

    forbidden = ()
    """Methods that are not allowed."""
    conditions = "known"
    """What it makes of ``If-None-Match``: known, ignored or refused."""

    def __init__(self):
        super().__init__(Handler)
        self.objects, self.lock = {}, threading.Lock()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def answer(self):
        """Answer a request of any method."""
        server, parts = self.server, urlsplit(self.path)
        bucket, _, name = unquote(parts.path)[1:].partition("/")
        asked = parse_qs(parts.query, keep_blank_values=True)
        body = self.body()
        with server.lock:
            server.requests.append((self.command, name))
            if self.command in server.forbidden:
                self.fail(403, "AccessDenied")
            elif bucket != BUCKET:
                self.fail(404, "NoSuchBucket", "The specified bucket does not exist")
            elif self.command == "PUT":
                self.put(name, body)
            elif self.command == "DELETE":
                server.objects.pop(name, None)
                self.send(204)
            elif "delete" in asked:
                for key in ElementTree.fromstring(body).iter():
                    if key.tag.endswith("Key"):
                        server.objects.pop(key.text, None)
                self.send(200, b"<DeleteResult/>")
            elif "list-type" in asked:
                self.list(asked.get("prefix", [""])[0], asked.get("delimiter", [""])[0])
            elif name not in server.objects:
                self.fail(404, "NoSuchKey")
            else:
                self.get(*server.objects[name])

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer

    def body(self):
        length = int(self.headers.get("Content-Length", 0))
        if "aws-chunked" not in self.headers.get("Content-Encoding", ""):
            return self.rfile.read(length)
        found = b""
        while size := int(self.rfile.readline().partition(b";")[0], 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return found

    def put(self, name, content):
        is_conditional = self.headers.get("If-None-Match") == "*"
        if is_conditional and self.server.conditions == "refused":
            self.fail(
                501, "NotImplemented", "A header implies functionality that is not implemented"
            )
        elif is_conditional and self.server.conditions == "known" and name in self.server.objects:
            self.fail(412, "PreconditionFailed")  # without a condition, as of MinIO
        else:
            self.server.objects[name] = content, time.time()
            self.send(200)

    def get(self, content, written):
        code, total = 200, len(content)
        more = {"Last-Modified": formatdate(written, usegmt=True)}
        asked = self.headers.get("Range", "").removeprefix("bytes=")
        if asked:
            begin, _, end = asked.partition("-")
            first = int(begin) if begin else total - int(end)
            last = min(int(end), total - 1) if begin and end else total - 1
            code, content = 206, content[first : last + 1]
            more["Content-Range"] = f"bytes {first}-{last}/{total}"
        self.send(code, content, more)

    def list(self, prefix, delimiter):
        found, folders = [], set()
        for name, (content, written) in sorted(self.server.objects.items()):
            if not name.startswith(prefix):
                continue
            inner, mark, _ = name.removeprefix(prefix).partition(delimiter or "\0")
            if mark:
                folders.add(prefix + inner + mark)
                continue
            when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(written))
            when += f".{written % 1 * 1000:03.0f}Z"
            found.append(
                f"<Contents><Key>{escape(name)}</Key><LastModified>{when}"
                f"</LastModified><Size>{len(content)}</Size></Contents>"
            )
        found += [
            f"<CommonPrefixes><Prefix>{one}</Prefix></CommonPrefixes>" for one in sorted(folders)
        ]
        text = (
            f"<ListBucketResult><IsTruncated>false</IsTruncated>{''.join(found)}</ListBucketResult>"
        )
        self.send(200, text.encode())

    def fail(self, status, code, message="no"):
        text = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
        self.send(status, text.encode())

    def send(self, status, content=b"", more=()):
        self.send_response(status)
        etag = hashlib.md5(content).hexdigest()
        for key, value in {
            "Content-Length": len(content),
            "ETag": f'"{etag}"',
            **dict(more),
        }.items():
            self.send_header(key, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_):
        pass
