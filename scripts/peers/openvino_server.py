#!/usr/bin/env python3
"""OpenVINO GenAI behind a small HTTP server, for scripts/compare serve and programs.

The package openvino-genai has no server of its own; this one puts its ContinuousBatchingPipeline (prefix caching on, prompts
in pieces beside running requests) behind what the two modes ask for: GET /health, GET /v1/models and POST
/v1/chat/completions with max_tokens, n, seed, ignore_eos, temperature, top_k, top_p, stream, stream_options and logprobs.
The pipeline tells the log-probability of the chosen token only, so top_logprobs lists that one.

One thread steps the pipeline, takes all texts of a step out of the detokenizer at once, and writes them to the clients.
"""
import argparse
import http.server
import json
import os
import queue
import socket
import threading

import openvino_genai as genai

ap = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
ap.add_argument("-m", "--model", required=True, help="a GGUF file, or a folder of OpenVINO's format")
ap.add_argument("--port", type=int, required=True)
ap.add_argument("--threads", type=int, default=os.cpu_count())
ap.add_argument("--max-num-seqs", type=int, default=256)
ap.add_argument("--cache-gb", type=int, default=2, help="of the KV cache (default 2)")
ap.add_argument("--batched-tokens", type=int, default=512, help="most tokens of a step (default 512)")
args = ap.parse_args()

WINDOW = 24  # tokens that are detokenized again with each new one, at most


class Text:
    """The text of one answer, taken out as its tokens come. The last characters wait while they may be half a one."""

    def __init__(self):
        self.ids, self.shown, self.text, self.all, self.logprobs = [], 0, "", 0, []

    def take(self, text):
        """What is new; text: the detokenizer's for self.ids."""
        if text.endswith("\ufffd"):
            return ""
        new, self.shown, self.text = text[self.shown:], len(text), self.text + text[self.shown:]
        return new


class Request:
    def __init__(self, connection, body):
        self.connection, self.stream, self.n = connection, body.get("stream"), body.get("n") or 1
        self.usage_wanted = (body.get("stream_options") or {}).get("include_usage")
        self.logprobs, self.max_tokens = body.get("logprobs"), body["max_tokens"]
        self.prompt, self.texts, self.done, self.gone = 0, {}, threading.Event(), False
        self.handle = None

    def send(self, record):
        if self.gone:
            return
        data = b"data: " + (record if isinstance(record, bytes) else json.dumps(record).encode()) + b"\n\n"
        try:
            self.connection.sendall(b"%x\r\n%s\r\n" % (len(data), data))
        except OSError:
            self.gone = True
            self.handle.cancel()

    def piece(self, index, text, last):
        self.send({"object": "chat.completion.chunk", "choices": [
            {"index": index, "delta": {"content": text}, "finish_reason": "length" if last else None}]})

    def usage(self):
        count = sum(t.all for t in self.texts.values())
        return {"prompt_tokens": self.prompt, "completion_tokens": count, "total_tokens": self.prompt + count}


class Engine(threading.Thread):
    def __init__(self):
        super().__init__(daemon=True)
        scheduler = genai.SchedulerConfig()
        scheduler.cache_size, scheduler.max_num_seqs = args.cache_gb, args.max_num_seqs
        scheduler.max_num_batched_tokens = args.batched_tokens
        scheduler.dynamic_split_fuse = scheduler.enable_prefix_caching = True
        self.pipe = genai.ContinuousBatchingPipeline(args.model, scheduler, "CPU",
                                                     {"INFERENCE_NUM_THREADS": args.threads})
        self.tokenizer, self.waiting, self.running, self.count = self.pipe.get_tokenizer(), queue.SimpleQueue(), [], 0

    def config(self, body):
        c = genai.GenerationConfig()
        c.max_new_tokens, c.num_return_sequences = body["max_tokens"], body.get("n") or 1
        c.ignore_eos = bool(body.get("ignore_eos"))
        c.logprobs = 1 if body.get("logprobs") else 0
        if body.get("temperature", 1) > 0:
            c.do_sample, c.temperature = True, body.get("temperature", 1)
            c.rng_seed = body.get("seed") or 0
            c.top_k, c.top_p = body.get("top_k") or c.top_k, body.get("top_p", 1)
        return c

    def add(self, request, body):
        """Called by the connection's thread; the tokenizer is thread-safe, the pipeline is the engine thread's."""
        text = self.tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True)
        ids = self.tokenizer.encode(text, add_special_tokens=False).input_ids
        request.prompt = ids.get_shape()[1]
        self.waiting.put((request, ids, self.config(body)))

    def take_in(self, block):
        while block or not self.waiting.empty():
            request, ids, config = self.waiting.get()
            request.handle = self.pipe.add_request(self.count, ids, config)
            self.count, block = self.count + 1, False
            self.running.append(request)

    def give_out(self):
        """What a step made, to those who wait for it."""
        fresh = []
        for request in self.running:
            while request.handle.can_read():
                for key, out in request.handle.read().items():
                    text = request.texts.setdefault(key, Text())
                    text.ids.extend(out.generated_ids)
                    text.all += len(out.generated_ids)
                    text.logprobs.extend(out.generated_log_probs)
                    fresh.append((request, list(request.texts).index(key), text))
        if fresh:
            texts = self.tokenizer.decode([t.ids for _, _, t in fresh], skip_special_tokens=True)
            for (request, index, t), text in zip(fresh, texts):
                new = t.take(text)
                if len(t.ids) > WINDOW and new:
                    t.ids = t.ids[-4:]
                    t.shown = len(self.tokenizer.decode(t.ids, skip_special_tokens=True))
                if request.stream and (new or t.all >= request.max_tokens):
                    request.piece(index, new, t.all >= request.max_tokens)
        for request in [r for r in self.running if str(r.handle.get_status()).rsplit(".", maxsplit=1)[-1] != "RUNNING"]:
            self.running.remove(request)
            if request.stream:
                if request.usage_wanted:
                    request.send({"object": "chat.completion.chunk", "choices": [], "usage": request.usage()})
                request.send(b"[DONE]")
            request.done.set()

    def run(self):
        while True:
            self.take_in(block=not self.running)
            self.pipe.step()
            self.give_out()


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_):  # pylint: disable=arguments-differ
        pass

    def reply(self, status, record):
        body = json.dumps(record).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        if self.path == "/health":
            self.reply(200, {"status": "ok"})
        elif self.path == "/v1/models":
            self.reply(200, {"object": "list", "data": [{"id": "model", "object": "model"}]})
        else:
            self.reply(404, {"error": {"message": "no such path"}})

    def do_POST(self):
        text = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.path != "/v1/chat/completions":
            self.reply(404, {"error": {"message": "no such path"}})
            return
        try:
            body = json.loads(text)
            body.setdefault("max_tokens", 256)
            request = Request(self.connection, body)
            if request.stream:
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
            engine.add(request, body)
        except (KeyError, ValueError, TypeError) as e:
            self.reply(400, {"error": {"message": str(e)}})
            return
        request.done.wait()
        if request.stream:
            self.wfile.write(b"0\r\n\r\n")
        else:
            self.reply(200, {"object": "chat.completion", "choices": [
                choice(i, t, request.logprobs) for i, t in enumerate(request.texts.values())], "usage": request.usage()})


def choice(index, text, logprobs):
    record = {"index": index, "message": {"role": "assistant", "content": text.text}, "finish_reason": "length"}
    if logprobs:
        first = {"token": text.text, "logprob": text.logprobs[0] if text.logprobs else 0.0}
        record["logprobs"] = {"content": [{**first, "top_logprobs": [first]}]}
    return record


class Server(http.server.ThreadingHTTPServer):
    request_queue_size = 256
    address_family = socket.AF_INET


engine = Engine()
engine.start()
Server(("127.0.0.1", args.port), Handler).serve_forever()
