"""A KV cache that moves from a process that prefills to one that decodes, layer by layer while the prefill goes on.

    pip install numpy, and this project        (with PyTorch installed its tensors are used, on a GPU if there is one)
    python examples/python/prefill_decode.py

The decoding process owns a cache of pages. For each request it picks free ones and tells the other process where they are.
That one runs the prompt through the model and, as soon as a layer's keys and values are computed, writes them there,
while it computes the next layer. A notification follows each layer's data. Then tokens are decoded, and must be those of
one process that does both.
"""

import sys
from multiprocessing import get_context

import numpy as np
from uccl import p2p

try:
    import torch as xp

    DEVICE = "cuda" if xp.cuda.is_available() else "cpu"
    tensor = lambda array: xp.from_numpy(np.ascontiguousarray(array)).to(DEVICE)
    zeros = lambda *shape: xp.zeros(shape, dtype=xp.float32, device=DEVICE)
except ImportError:
    xp, DEVICE, tensor = np, "cpu", np.ascontiguousarray
    zeros = lambda *shape: np.zeros(shape, np.float32)

VOCABULARY, LAYERS, HEADS, WIDTH = 512, 6, 4, 128
PAGES, PAGE_TOKENS = 64, 16
NEW_TOKENS = 20


class Model:
    """A transformer with random weights: the same in every process."""

    def __init__(self):
        random = np.random.default_rng(7)
        weight = lambda *shape: tensor(random.normal(0, shape[0] ** -0.5, shape).astype(np.float32))
        self.embedding, self.head = weight(VOCABULARY, WIDTH), weight(WIDTH, VOCABULARY)
        self.layers = [
            {
                "qkv": weight(WIDTH, 3 * WIDTH),
                "out": weight(WIDTH, WIDTH),
                "up": weight(WIDTH, 4 * WIDTH),
                "down": weight(4 * WIDTH, WIDTH),
            }
            for _ in range(LAYERS)
        ]

    def layer(self, number, x, first, kv):
        """Runs a layer on the tokens from place ``first`` on. ``kv(keys, values)`` takes their keys
        and values and returns all so far."""
        weights = self.layers[number]
        q, k, v = (normal(x) @ weights["qkv"]).reshape(-1, 3, HEADS, WIDTH // HEADS).swapaxes(0, 1)
        k, v = kv(k, v)
        scores = q.swapaxes(0, 1) @ k.swapaxes(0, 1).swapaxes(1, 2) / (WIDTH // HEADS) ** 0.5
        places = tensor(np.arange(len(k)))
        future = places[None, :] > places[first : first + len(q), None]
        scores = scores - 1e9 * future
        weighted = xp.exp(scores - xp.amax(scores, axis=-1, keepdims=True))
        attended = (weighted / weighted.sum(axis=-1, keepdims=True)) @ v.swapaxes(0, 1)
        x = x + attended.swapaxes(0, 1).reshape(-1, WIDTH) @ weights["out"]
        return x + xp.tanh(normal(x) @ weights["up"]) @ weights["down"]

    def next_token(self, x):
        return int((normal(x[-1:]) @ self.head).argmax())


def normal(x):
    return x / (x * x).mean(axis=-1, keepdims=True) ** 0.5


class Cache:
    """Pages of keys and values, one array a layer: page, keys or values, place in the page, head, number."""

    def __init__(self):
        shape = (PAGES, 2, PAGE_TOKENS, HEADS, WIDTH // HEADS)
        self.layers = [zeros(*shape) for _ in range(LAYERS)]
        self.page_bytes = self.layers[0][0].nbytes

    def store(self, layer, pages, first, k, v):
        for place in range(first, first + len(k)):
            page = self.layers[layer][pages[place // PAGE_TOKENS]]
            page[0, place % PAGE_TOKENS] = k[place - first]
            page[1, place % PAGE_TOKENS] = v[place - first]

    def load(self, layer, pages, length):
        both = self.layers[layer][pages].swapaxes(0, 1).reshape(2, -1, HEADS, WIDTH // HEADS)
        return both[0, :length], both[1, :length]

    def addresses(self, layer, pages):
        array = self.layers[layer]
        start = array.data_ptr() if hasattr(array, "data_ptr") else array.ctypes.data
        return [start + page * self.page_bytes for page in pages]


def prefill(model, cache, pages, prompt, layer_done):
    """Fills the pages with a prompt's keys and values, and returns the first new token."""
    x = model.embedding[tensor(np.array(prompt))]
    for number in range(LAYERS):

        def keep(k, v):
            cache.store(number, pages, 0, k, v)
            layer_done(number)
            return k, v

        x = model.layer(number, x, 0, keep)
    return model.next_token(x)


def decode(model, cache, pages, length, token):
    """Decodes tokens after a prompt of this length. The pages hold the prompt's keys and values."""
    tokens = [token]
    for place in range(length, length + NEW_TOKENS - 1):
        x = model.embedding[tensor(np.array(tokens[-1:]))]
        for number in range(LAYERS):

            def keep(k, v):
                cache.store(number, pages, place, k, v)
                return cache.load(number, pages, place + 1)

            x = model.layer(number, x, place, keep)
        tokens.append(model.next_token(x))
    return tokens


def pages_for(length):
    return -(-length // PAGE_TOKENS)


def must(answer):
    """Returns the result of a call. Ends the program if the first element says that it failed."""
    ok, *rest = answer if isinstance(answer, tuple) else (answer,)
    if not ok:
        raise SystemExit(p2p.last_error())
    return rest[0] if rest else None


def prefilling(pipe):
    """The process that prefills. Its requests come through a pipe; in a real system they come from
    a router."""
    model, cache = Model(), Cache()
    stream = xp.cuda.current_stream() if DEVICE == "cuda" else None
    with p2p.Endpoint(bind="127.0.0.1") as endpoint:
        regions = [must(endpoint.reg(array)) for array in cache.layers]
        pipe.send(endpoint.get_metadata())
        ok, _ip, _gpu, conn = endpoint.accept(timeout=60)
        must(ok)
        while request := pipe.recv():
            prompt, adverts = request
            pages = list(range(pages_for(len(prompt))))
            writes = []

            def send(layer):
                # One write for all pages, which are not side by side at the other end. On a GPU it
                # follows the kernels that compute them.
                count = len(pages)
                write = endpoint.writev_async(
                    conn,
                    [regions[layer]] * count,
                    cache.addresses(layer, pages),
                    [cache.page_bytes] * count,
                    adverts[layer],
                    notif=b"layer %d" % layer,
                    stream=stream,
                )
                writes.append(must(write))

            token = prefill(model, cache, pages, prompt, send)
            # The next request uses the same pages, so all writes must have ended by then.
            for write in writes:
                if endpoint.wait(write) != (True, True):
                    raise SystemExit(endpoint.transfer_error(write))
            pipe.send(token)


def decoding(pipe, prompts):
    """The process that decodes."""
    model, cache = Model(), Cache()
    free = list(np.random.default_rng(1).permutation(PAGES))
    with p2p.Endpoint(bind="127.0.0.1") as endpoint:
        regions = [must(endpoint.reg(array)) for array in cache.layers]
        conn = must(endpoint.add_remote_endpoint(pipe.recv()))
        for prompt in prompts:
            pages = [int(free.pop()) for _ in range(pages_for(len(prompt) + NEW_TOKENS))]
            filled = pages[: pages_for(len(prompt))]
            adverts = [
                must(
                    endpoint.advertisev(
                        [mr] * len(filled),
                        cache.addresses(layer, filled),
                        [cache.page_bytes] * len(filled),
                    )
                )
                for layer, mr in enumerate(regions)
            ]
            pipe.send((prompt, adverts))
            arrived: list[bytes] = []
            while len(arrived) < LAYERS:
                arrived += [payload for _, payload in endpoint.wait_notifs(timeout=60)]
            if sorted(arrived) != [b"layer %d" % layer for layer in range(LAYERS)]:
                raise SystemExit(f"these came: {arrived}")
            token = pipe.recv()
            pipe.send(decode(model, cache, pages, len(prompt), token))
            free += pages
        pipe.send(endpoint.connection(conn)["path"])


def alone(prompts):
    """Yields the tokens of one process that prefills and decodes."""
    model, cache = Model(), Cache()
    for prompt in prompts:
        pages = list(range(pages_for(len(prompt) + NEW_TOKENS)))
        token = prefill(model, cache, pages, prompt, lambda layer: None)
        yield decode(model, cache, pages, len(prompt), token)


def main():
    random = np.random.default_rng(3)
    prompts = [
        [int(t) for t in random.integers(0, VOCABULARY, length)] for length in (5, 16, 200, 77)
    ]
    context = get_context("spawn")
    to_prefill, theirs = context.Pipe()
    to_decode, others = context.Pipe()
    processes = [
        context.Process(target=prefilling, args=(theirs,), daemon=True),
        context.Process(target=decoding, args=(others, prompts), daemon=True),
    ]
    for process in processes:
        process.start()
    theirs.close()
    others.close()
    try:
        to_decode.send(to_prefill.recv())
        for prompt, expected in zip(prompts, alone(prompts)):
            to_prefill.send(to_decode.recv())
            to_decode.send(to_prefill.recv())
            tokens = to_decode.recv()
            print(
                f"{len(prompt):4} tokens prefilled there, {len(tokens)} decoded here:",
                *tokens[:8],
                "...",
            )
            if tokens != expected:
                raise SystemExit(f"one process decodes {expected}")
        print("moved over", to_decode.recv(), "on", DEVICE, "with", xp.__name__)
        to_prefill.send(None)
    except EOFError:
        raise SystemExit("a process has ended")
    for process in processes:
        process.join()
    sys.exit(any(process.exitcode for process in processes))


if __name__ == "__main__":
    main()
