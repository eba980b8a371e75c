"""A proxy for encode and prefill-decode instances of vLLM that does what the example of vLLM's documentation does.

It asks the encoder for each item of a request by itself, with one token to write, waits for all, and sends the request as it
came to the other instance. A failure of an encode fails the request; nothing is retried, and nothing is verified.
(docs.vllm.ai, "Disaggregated Encoder".) epd_proxy.py PORT ENCODER_URL PD_URL
"""

import asyncio
import sys

import aiohttp
from aiohttp import web

ITEMS = ("image_url", "audio_url", "input_audio", "video_url")


def items(body):
    """The items of a chat, each as the content of a message of its own."""
    parts = [message.get("content") for message in body.get("messages", [])]
    return [part for content in parts if isinstance(content, list) for part in content if part.get("type") in ITEMS]


class Proxy:
    """The two instances behind one address."""

    def __init__(self, encoder, pd):
        self.encoder, self.pd = encoder, pd
        self.session = None

    async def start(self, _app):
        timeout = aiohttp.ClientTimeout(total=600)
        self.session = aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))

    async def stop(self, _app):
        await self.session.close()

    async def encode(self, body, item):
        asked = {"model": body.get("model"), "max_tokens": 1, "stream": False,
                 "messages": [{"role": "user", "content": [item, {"type": "text", "text": ""}]}]}
        async with self.session.post(f"{self.encoder}/v1/chat/completions", json=asked) as response:
            if response.status != 200:
                raise web.HTTPBadGateway(text=(await response.text())[:400])
            await response.read()

    async def chat(self, request):
        body = await request.json()
        try:
            await asyncio.gather(*(self.encode(body, item) for item in items(body)))
            async with self.session.post(f"{self.pd}/v1/chat/completions", json=body) as response:
                answer = web.StreamResponse(status=response.status, headers={"content-type": response.content_type})
                await answer.prepare(request)
                async for chunk in response.content.iter_any():
                    await answer.write(chunk)
                return answer
        except aiohttp.ClientError as e:
            raise web.HTTPBadGateway(text=str(e)) from e

    async def forward(self, request):
        async with self.session.get(f"{self.pd}{request.path}") as response:
            return web.Response(status=response.status, body=await response.read(), content_type=response.content_type)


def main():
    proxy = Proxy(sys.argv[2], sys.argv[3])
    app = web.Application(client_max_size=64 << 20)
    app.on_startup.append(proxy.start)
    app.on_cleanup.append(proxy.stop)
    app.router.add_post("/v1/chat/completions", proxy.chat)
    app.router.add_get("/{path:.*}", proxy.forward)
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None)


if __name__ == "__main__":
    main()
