"""The drill: requests at a steady concurrency while an encoder is killed, objects are deleted and damaged, and Redis restarts.

Every image is asked about once before, without faults, and twice under them: an answer is right if it is the same. Before the
faults the instance that decodes is started anew and half of the stored rows are removed, so that it needs the store and the
encoder. A client does not retry, so what is lost is lost by the system.
"""

import base64
import collections
import http.client
import io
import json
import queue
import random
import struct
import threading
import time
import urllib.parse
import zlib

IN_FLIGHT = 8
COLOURS = [(220, 40, 40), (40, 170, 60), (50, 80, 220), (230, 210, 50)]


def png(seed):
    """A scene as those the model was trained with: shapes on a plain ground, 112×112."""
    rng = random.Random(seed)
    side = 112
    shapes = [(rng.choice(COLOURS), rng.randrange(10, 80), rng.randrange(10, 80), rng.randrange(14, 28), rng.random() < 0.5)
              for _ in range(rng.randrange(1, 4))]
    rows = bytearray()
    for y in range(side):
        rows.append(0)
        for x in range(side):
            rows += bytes(pixel(shapes, x, y))
    out = io.BytesIO()
    out.write(b"\x89PNG\r\n\x1a\n")
    for kind, data in ((b"IHDR", struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)), (b"IDAT", zlib.compress(rows, 1)), (b"IEND", b"")):
        out.write(struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)))
    return out.getvalue()


def pixel(shapes, x, y):
    for colour, left, top, size, is_round in shapes:
        dx, dy = x - left - size / 2, y - top - size / 2
        inside = dx * dx + dy * dy < size * size / 4 if is_round else max(abs(dx), abs(dy)) < size / 2
        if inside:
            return colour
    return (245, 245, 245)


def ask(url, image, n_tokens=12):
    """The text of an answer, or raises `OSError` or `ValueError` with what came instead."""
    place = urllib.parse.urlsplit(url)
    source = "data:image/png;base64," + base64.b64encode(image).decode()
    content = [{"type": "image_url", "image_url": {"url": source}}, {"type": "text", "text": "What is in this picture?"}]
    body = {"model": "m", "max_tokens": n_tokens, "temperature": 0, "messages": [{"role": "user", "content": content}]}
    connection = http.client.HTTPConnection(place.hostname, place.port, timeout=180)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        answer = response.read()
        if response.status != 200:
            raise ValueError(f"{response.status} {answer[:160].decode('utf-8', 'replace')}")
        return json.loads(answer)["choices"][0]["message"]["content"]
    except http.client.HTTPException as e:
        raise OSError(f"{type(e).__name__}: {e}") from e
    finally:
        connection.close()


def ask_all(url, images, on_end=lambda n: None):
    """Answers by place in the list, an exception where one failed; `IN_FLIGHT` at a time."""
    waiting, answers, lock = queue.SimpleQueue(), [None] * len(images), threading.Lock()
    n_ended = 0
    for place in range(len(images)):
        waiting.put(place)

    def work():
        nonlocal n_ended
        while True:
            try:
                place = waiting.get_nowait()
            except queue.Empty:
                return
            try:
                answers[place] = ask(url, images[place])
            except (OSError, ValueError, KeyError) as e:
                answers[place] = e
            with lock:
                n_ended += 1
                ended = n_ended
            on_end(ended)

    threads = [threading.Thread(target=work) for _ in range(IN_FLIGHT)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


class Faults:
    """Faults at shares of the requests; each is written down with what it met."""

    def __init__(self, running, n_requests):
        self.running, self.noted, self.threads = running, [], []
        # One after the other: two that restart a process would leave one behind.
        self.one = threading.Lock()
        at = {0.1: self.kill_encoder, 0.3: self.delete_objects, 0.45: self.damage_objects, 0.6: self.restart_redis,
              0.75: self.kill_encoder, 0.9: self.damage_objects}
        self.due = {max(int(share * n_requests), 1): fault for share, fault in at.items()}

    def on_end(self, n_ended):
        fault = self.due.get(n_ended)
        if fault:
            thread = threading.Thread(target=self.do, args=(fault, n_ended))
            self.threads.append(thread)
            thread.start()

    def do(self, fault, n_ended):
        try:
            with self.one:
                what = fault()
        except OSError as e:
            what = f"not done: {e}"
        self.noted.append({"after": n_ended, "fault": fault.__name__, "what": what})

    def kill_encoder(self):
        encoder = self.running.processes.get("encoder")
        if encoder is None:
            return "there is none"
        encoder.kill()
        time.sleep(1)
        encoder.start()
        return "killed, and started again after 1 s"

    def restart_redis(self):
        redis = self.running.processes.get("redis")
        if redis is None:
            return "there is none"
        redis.kill()
        time.sleep(1)
        redis.start()
        return "killed, and started again empty after 1 s"

    def delete_objects(self):
        found = self.objects()[::3]
        for name in found:
            self.remove(name)
        return f"{len(found)} deleted"

    def damage_objects(self):
        found = self.objects()[1::3]
        for name in found:
            self.damage(name)
        return f"{len(found)} damaged"

    def objects(self):
        """Names of what holds rows: chunks in Redis, or files."""
        if self.running.redis_port is None:
            return sorted((self.running.folder / "shared").rglob("*.safetensors"))
        names = resp(self.running.redis_port, "KEYS", "triptych:ec:*:c0")
        return sorted(name.decode() for name in names)

    def remove(self, name):
        if self.running.redis_port is None:
            name.unlink(missing_ok=True)
        else:
            resp(self.running.redis_port, "DEL", name)

    def damage(self, name):
        if self.running.redis_port is None:
            data = bytearray(name.read_bytes())
            data[-9] ^= 0x7f
            name.write_bytes(data)
        else:
            byte = resp(self.running.redis_port, "GETRANGE", name, "-9", "-9") or b"\0"
            length = resp(self.running.redis_port, "STRLEN", name)
            resp(self.running.redis_port, "SETRANGE", name, str(length - 9), bytes([byte[0] ^ 0x7f]))


def resp(port, *words):
    """One command of Redis, and its answer."""
    import socket

    with socket.create_connection(("127.0.0.1", port), 5) as connection:
        raw = [word if isinstance(word, bytes) else word.encode() for word in words]
        connection.sendall(b"*%d\r\n" % len(raw) + b"".join(b"$%d\r\n%s\r\n" % (len(word), word) for word in raw))
        return reply(connection.makefile("rb"))


def reply(file):
    line = file.readline().rstrip(b"\r\n")
    kind, rest = line[:1], line[1:]
    if kind == b"$":
        length = int(rest)
        return file.read(length + 2)[:-2] if length >= 0 else None
    if kind == b"*":
        return [reply(file) for _ in range(int(rest))]
    if kind == b":":
        return int(rest)
    if kind == b"-" or not kind:
        raise OSError(f"Redis: {rest.decode('utf-8', 'replace')}")
    return rest


def prepare(running, image):
    """Starts the instance that decodes anew, so that it has no rows, and removes half of those that are stored."""
    pd = running.processes["pd"]
    pd.kill()
    pd.start()
    if pd.url:
        pd.ready(pd.url)
    faults = Faults(running, 1)
    for name in faults.objects()[::2]:
        faults.remove(name)
    until = time.monotonic() + 300
    while True:
        try:
            return ask(running.url, image)
        except (OSError, ValueError):
            if time.monotonic() > until:
                raise
            time.sleep(0.5)


def run(args, running):
    """Counts, faults and the first texts of what was lost."""
    n_images = max(args.drill_requests // 2, 1)
    images = [png(seed) for seed in range(n_images)]
    expected = ask_all(running.url, images)
    broken = [answer for answer in expected if not isinstance(answer, str) or not answer]
    if broken:
        return {"drill": {"error": f"{len(broken)} of {n_images} answers failed without any fault: {broken[0]}"}}
    prepare(running, png(n_images))
    # Each image twice, the second time a while after the first.
    order = [i for start in range(0, n_images, 25) for _ in range(2) for i in range(start, min(start + 25, n_images))]
    faults = Faults(running, len(order))
    began = time.monotonic()
    answers = ask_all(running.url, [images[i] for i in order], faults.on_end)
    took = time.monotonic() - began
    for thread in faults.threads:
        thread.join()
    lost = [answer for answer in answers if not isinstance(answer, str)]
    right = sum(answer == expected[i] for answer, i in zip(answers, order))
    texts = collections.Counter(f"{type(e).__name__}: {e}"[:120] for e in lost)
    return {"drill": {
        "requests": len(order), "right": right, "lost": len(lost), "wrong": len(order) - right - len(lost),
        "took_s": round(took, 1), "different_answers": len(set(expected)), "faults": faults.noted, "errors": texts.most_common(5)}}
