"""A closed loop of clients over HTTP: so many requests in flight, each followed by the next, until all have ended.

What a client sees is what counts: the time of the first piece of text, of each further token, of the whole answer. An answer
that is refused, broken off, empty or not what was asked is an error. Nothing but Python's own library.
"""

import base64
import http.client
import io
import json
import queue
import random
import statistics
import struct
import threading
import time
import urllib.parse
import wave
import zlib

#: Tokens that each chat answer has, whatever a model of random weights would write.
N_TOKENS = 32
#: Words that the transcript of the clip must have among others; an answer without most of them is wrong.
WORDS = "fellow americans ask not what your country can do for you"


def png(seed, side):
    """An image of noise that no server has seen."""
    pixels = random.Random(seed).randbytes(side * side * 3)
    rows = b"".join(b"\0" + pixels[y * side * 3:(y + 1) * side * 3] for y in range(side))

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">2I5B", side, side, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(rows, 1)) + chunk(b"IEND", b"")


def clip(path, seed):
    """The clip with noise in the lowest bits, so that no server has seen it: WAV."""
    with wave.open(str(path)) as file:
        head, frames = file.getparams(), file.readframes(file.getnframes())
    noise = random.Random(seed)
    samples = struct.unpack(f"<{len(frames) // 2}h", frames)
    samples = [max(-32768, min(32767, sample + noise.randint(-2, 2))) for sample in samples]
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setparams(head)
        file.writeframes(struct.pack(f"<{len(samples)}h", *samples))
    return out.getvalue()


def text(seed, n_words):
    """Words that differ from the first on, so that no prefix is found."""
    words = random.Random(seed)
    return " ".join(words.choice(WORDS.split()) for _ in range(n_words))


def chat(seed, n_words, side=None):
    """Body of a chat request, with an image or without: (headers, body)."""
    parts = [{"type": "text", "text": f"{seed} {text(seed, n_words)}"}]
    if side:
        url = "data:image/png;base64," + base64.b64encode(png(seed, side)).decode()
        parts.insert(0, {"type": "image_url", "image_url": {"url": url}})
    body = {"model": "m", "messages": [{"role": "user", "content": parts}], "max_tokens": N_TOKENS, "min_tokens": N_TOKENS,
            "ignore_eos": True, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}}
    return {"Content-Type": "application/json"}, json.dumps(body).encode()


def transcription(path, seed, is_stream):
    """Body of a transcription: (headers, body)."""
    fields = {"model": "m", "response_format": "json", "temperature": "0", "language": "en"}
    fields |= {"stream": "true"} if is_stream else {}
    mark = "----------served"
    body = b"".join(f'--{mark}\r\nContent-Disposition: form-data; name="{k}"\r\n\r\n{v}\r\n'.encode() for k, v in fields.items())
    body += f'--{mark}\r\nContent-Disposition: form-data; name="file"; filename="{seed}.wav"\r\n'.encode()
    body += b"Content-Type: audio/wav\r\n\r\n" + clip(path, seed) + f"\r\n--{mark}--\r\n".encode()
    return {"Content-Type": f"multipart/form-data; boundary={mark}"}, body


def piece(event):
    """Text of an event of a stream, of any of the servers."""
    if event.get("type") == "transcript.text.done":
        return ""
    choices = event.get("choices") or [{}]
    return event.get("delta") or (choices[0].get("delta") or {}).get("content") or ""


def ask(url, path, request, timeout_s):
    """One request: times in seconds since it was sent, tokens, and the text; raises what went wrong."""
    address = urllib.parse.urlparse(url)
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=timeout_s)
    headers, body = request
    began = time.perf_counter()
    try:
        connection.request("POST", path, body, headers)
        response = connection.getresponse()
        if response.status != 200:
            raise ValueError(f"status {response.status}: {response.read(300).decode(errors='replace')}")
        if "event-stream" not in (response.getheader("Content-Type") or ""):
            found = json.loads(response.read())["text"]
            return {"first": None, "end": time.perf_counter() - began, "n_tokens": None, "text": found}
        return streamed(response, began)
    finally:
        connection.close()


def streamed(response, began):
    """What `ask` tells of a stream."""
    first, last, n_tokens, n_pieces, found = None, None, None, 0, []
    for line in response:
        if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
            continue
        event = json.loads(line[5:])
        if "error" in event:
            raise ValueError(str(event["error"])[:300])
        usage = event.get("usage") or {}
        n_tokens = usage.get("completion_tokens") or usage.get("output_tokens") or n_tokens
        if more := piece(event):
            last = time.perf_counter() - began
            first = last if first is None else first
            n_pieces += 1
            found.append(more)
    if first is None:
        raise ValueError("an answer without text")
    return {"first": first, "end": last, "n_tokens": n_tokens or n_pieces, "text": "".join(found)}


def wrong(answer, is_audio):
    """Why an answer does not count; empty: it does."""
    if is_audio:
        heard = set("".join(c if c.isalpha() else " " for c in answer["text"].lower()).split())
        missing = [word for word in set(WORDS.split()) if word not in heard]
        return f"wrong text: {answer['text'][:80]}" if len(missing) > 2 else ""
    return "" if answer["n_tokens"] == N_TOKENS else f"{answer['n_tokens']} tokens"


def run(url, path, requests, n_in_flight, is_audio, timeout_s=300):
    """All requests with so many in flight: figures, and the errors by text. The first round of them is not judged."""
    for some in (requests[:n_in_flight], requests[n_in_flight:]):
        began = time.perf_counter()
        answers, errors = loop(url, path, some, n_in_flight, timeout_s)
        took = time.perf_counter() - began
    right = []
    for answer in answers:
        why = wrong(answer, is_audio)
        right += [] if why else [answer]
        errors += [why] if why else []
    return figures(right, errors, took)


def loop(url, path, requests, n_in_flight, timeout_s):
    """(answers, errors) of a closed loop."""
    left = queue.SimpleQueue()
    for request in requests:
        left.put(request)
    answers, errors = [], []

    def client():
        while True:
            try:
                request = left.get_nowait()
            except queue.Empty:
                return
            try:
                answers.append(ask(url, path, request, timeout_s))
            # Whatever goes wrong is counted, and the next request is sent.
            except (OSError, ValueError, KeyError, http.client.HTTPException) as e:
                errors.append(f"{type(e).__name__}: {e}"[:200])

    clients = [threading.Thread(target=client) for _ in range(n_in_flight)]
    for one in clients:
        one.start()
    for one in clients:
        one.join()
    return answers, errors


def figures(right, errors, took):
    """Medians in milliseconds; `None` where no stream tells."""
    firsts = [a["first"] for a in right if a["first"] is not None]
    tpots = [(a["end"] - a["first"]) / (a["n_tokens"] - 1) for a in right if a["first"] is not None and a["n_tokens"] > 1]

    def median(values):
        return round(statistics.median(values) * 1e3, 2) if values else None

    return {"requests_per_s": round(len(right) / took, 4), "ttft_p50_ms": median(firsts), "tpot_p50_ms": median(tpots),
            "answer_p50_ms": median([a["end"] for a in right]), "n": len(right) + len(errors), "n_errors": len(errors),
            "errors": sorted(set(errors))[:3]}
