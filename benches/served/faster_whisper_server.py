"""A minimal server of `/v1/audio/transcriptions` over faster-whisper: faster_whisper_server.py PORT DIR TYPE THREADS WORKERS.

faster-whisper has no server of its own, and speaches, which is one, is not on PyPI. As speaches does, it hands each request
to the library on a thread of its own; the library runs as many at once as it has workers. Greedy, without timestamps and
without a second try at another temperature, as the other servers are asked to.
"""

import email.parser
import email.policy
import io
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from faster_whisper import WhisperModel


class Handler(BaseHTTPRequestHandler):
    """Health, and transcriptions by `model`, which is set on the class."""

    protocol_version = "HTTP/1.1"
    model = None

    def do_GET(self):
        self.answer({"status": "ok"})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        head = f"Content-Type: {self.headers['Content-Type']}\r\n\r\n".encode()
        message = email.parser.BytesParser(policy=email.policy.HTTP).parsebytes(head + body)
        parts = {part.get_param("name", header="content-disposition"): part for part in message.iter_parts()}
        audio = io.BytesIO(parts["file"].get_payload(decode=True))
        segments, _ = self.model.transcribe(audio, language="en", beam_size=1, temperature=0.0, without_timestamps=True,
                                            condition_on_previous_text=False, vad_filter=False)
        self.answer({"text": "".join(segment.text for segment in segments)})

    def answer(self, value):
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_):
        """Nothing: a line for each request would be work that the others do not do."""


def main():
    port, directory, dtype, threads, workers = sys.argv[1:6]
    Handler.model = WhisperModel(directory, device="cpu", compute_type=dtype, cpu_threads=int(threads), num_workers=int(workers))
    ThreadingHTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()


if __name__ == "__main__":
    main()
