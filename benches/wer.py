"""Words that the real Whisper tiny.en gets wrong, in each precision: what fewer bits cost in speech.

    cargo build --release && cargo xtask whisper && apt-get install flite
    python3 benches/wer.py                      # or --binary target/debug/triptych --precisions f32,int4

Sixteen sentences, spoken by two voices of flite, go one by one through a cluster of one encoder and one PD worker. A word
error is one word put in, left out or changed (Levenshtein), after case and punctuation are gone and small numbers are
digits. Speech that is made is easy: the figures compare precisions, and do not transfer to other recordings.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

SENTENCES = """
The quick brown fox jumps over the lazy dog near the river bank.
She sells sea shells by the sea shore every summer morning.
Please call the office before noon and ask for the new schedule.
The weather tomorrow will be cloudy with a chance of rain in the evening.
He opened the old wooden door and walked slowly into the dark room.
Our train leaves from platform nine at a quarter past seven.
Scientists have found a new kind of fish in the deep ocean.
The children played in the garden until their mother called them for dinner.
I would like a cup of coffee with milk and two spoons of sugar.
The company said that it would open three new stores next year.
They climbed the mountain in two days and slept under the stars.
A good book can take you to places that you have never seen.
The doctor told him to rest and to drink plenty of water.
Music was playing softly while the guests arrived at the party.
The bridge was closed for repairs after the heavy storm last week.
Nobody knew who had written the letter or why it was sent.
""".strip().splitlines()
VOICES = ["slt", "rms"]
DIGITS = {"two": "2", "three": "3", "seven": "7", "nine": "9"}
ADDRESS = "127.0.0.1:8080"


def words(text):
    return [DIGITS.get(word, word) for word in re.sub(r"[^a-z0-9' ]", " ", text.lower()).split()]


def distance(expected, actual):
    """Words put in, left out or changed."""
    row = list(range(len(actual) + 1))
    for i, a in enumerate(expected, 1):
        before, row[0] = row[0], i
        for j, b in enumerate(actual, 1):
            before, row[j] = row[j], min(row[j] + 1, row[j - 1] + 1, before + (a != b))
    return row[-1]


def clips(folder):
    """`(sentence, WAV file)` of each sentence and voice."""
    for i, sentence in enumerate(SENTENCES):
        for voice in VOICES:
            path = Path(folder) / f"{i}-{voice}.wav"
            subprocess.run(["flite", "-voice", voice, "-t", sentence, "-o", path], check=True)
            yield sentence, path


def written(path):
    """What the cluster writes down."""
    edge = "edge-of-a-part"
    part = f'--{edge}\r\nContent-Disposition: form-data; name="file"; filename="clip.wav"\r\n\r\n'
    body = part.encode() + path.read_bytes() + f"\r\n--{edge}--\r\n".encode()
    headers = {"Content-Type": f"multipart/form-data; boundary={edge}"}
    request = urllib.request.Request(f"http://{ADDRESS}/v1/audio/transcriptions", body, headers)
    with urllib.request.urlopen(request, timeout=60) as response:
        return json.load(response)["text"]


def wait_until_ready(cluster, first, seconds=60):
    end = time.monotonic() + seconds
    while cluster.poll() is None and time.monotonic() < end:
        try:
            return written(first)
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.5)
    raise SystemExit("the cluster did not become ready; its own words are above")


def measure(args, precision, spoken):
    """`(errors, words, texts)`."""
    command = [args.binary, "up", "--model", args.model, "--precision", precision, "--log", "warn"]
    cluster = subprocess.Popen(command, stdout=sys.stderr)
    try:
        wait_until_ready(cluster, spoken[0][1])
        texts = [written(path) for _, path in spoken]
    finally:
        cluster.terminate()
        cluster.wait()
    errors = sum(distance(words(sentence), words(text)) for (sentence, _), text in zip(spoken, texts))
    return errors, sum(len(words(sentence)) for sentence, _ in spoken), texts


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--binary", default="target/release/triptych")
    parser.add_argument("--model", default=".cache/whisper-tiny.en")
    parser.add_argument("--precisions", default="f32,bf16,int8,int4", help="the first is what the others are compared with")
    args = parser.parse_args()
    print("| precision | word errors | share | clips as in the first row |\n| --- | ---: | ---: | ---: |")
    first = None
    with tempfile.TemporaryDirectory() as folder:
        spoken = list(clips(folder))
        for precision in args.precisions.split(","):
            errors, n_words, texts = measure(args, precision, spoken)
            first = first or texts
            same = sum(a == b for a, b in zip(first, texts))
            print(f"| {precision} | {errors} of {n_words} | {errors / n_words:.1%} | {same} of {len(texts)} |", flush=True)


if __name__ == "__main__":
    main()
