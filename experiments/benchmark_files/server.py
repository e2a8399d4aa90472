"""An OpenAI-compatible server with fixed times: TTFT 40 ms, ITL 8 ms. Benchmark tools write their files against it.

python server.py PORT MODEL TOKENIZER
"""

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from transformers import AutoTokenizer

TTFT_S, ITL_S = 0.040, 0.008
FAILS = "fail"  # a model of this name answers every fourth request with an error


class Handler(BaseHTTPRequestHandler):
    """Answers /v1/models, /v1/completions and /v1/chat/completions."""

    protocol_version = "HTTP/1.1"
    model = sys.argv[2]
    tokenizer = AutoTokenizer.from_pretrained(sys.argv[3])
    n_requests = 0

    def log_message(self, *_: object) -> None:
        """Prints nothing."""

    def do_GET(self) -> None:
        """The list of models."""
        info = {"data": [{"id": self.model, "object": "model", "max_model_len": 32768}]}
        self._answer({**info, "object": "list", "model_path": self.model})

    def do_POST(self) -> None:
        """A completion of so many tokens as the request allows."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])) or b"{}")
        is_chat = "chat" in self.path
        prompt = body.get("messages") if is_chat else body.get("prompt", "")
        text = prompt if isinstance(prompt, str) else json.dumps(prompt)
        if is_chat:
            text = "".join(
                part if isinstance(part, str) else part.get("text", "")
                for message in prompt
                for part in (
                    message["content"]
                    if isinstance(message["content"], list)
                    else [message["content"]]
                )
            )
        n_prompt = (
            len(prompt)
            if isinstance(prompt, list) and not is_chat
            else len(self.tokenizer.encode(text, add_special_tokens=False))
        )
        n_output = body.get("max_completion_tokens") or body.get("max_tokens") or 16
        usage = {
            "prompt_tokens": n_prompt,
            "completion_tokens": n_output,
            "total_tokens": n_prompt + n_output,
        }
        Handler.n_requests += 1
        if FAILS in self.model and Handler.n_requests % 4 == 0:
            self.send_error(500, "the server failed")
            return
        time.sleep(TTFT_S)
        if not body.get("stream"):
            time.sleep(ITL_S * (n_output - 1))
            self._answer(
                {**self._chunk("a" * n_output, is_chat=is_chat, is_last=True), "usage": usage}
            )
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        start_s = time.perf_counter()
        for i in range(n_output):
            time.sleep(max(0.0, start_s + i * ITL_S - time.perf_counter()))
            self._event(
                {**self._chunk("a", is_chat=is_chat, is_last=i == n_output - 1), "usage": None}
            )
        self._event(
            {**self._chunk(None, is_chat=is_chat, is_last=True), "choices": [], "usage": usage}
        )
        self.wfile.write(b"data: [DONE]\n\n")
        self.close_connection = True

    def _chunk(self, text: str | None, *, is_chat: bool, is_last: bool) -> dict[str, Any]:
        part = (
            {"delta": {"content": text}, "message": {"content": text}}
            if is_chat
            else {"text": text}
        )
        choice = {"index": 0, **part, "finish_reason": "length" if is_last else None}
        kind = "chat.completion.chunk" if is_chat else "text_completion"
        return {"id": "1", "object": kind, "created": 0, "model": self.model, "choices": [choice]}

    def _event(self, document: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(document)}\n\n".encode())
        self.wfile.flush()

    def _answer(self, document: dict[str, Any]) -> None:
        content = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
