"""Greedy decoding with a cache of keys and values: one token of each sequence at a time, on a GPU by a CUDA graph."""

import torch

WARM_UP = 3


class Decoder:
    """A model's step, with its tensors at fixed addresses: a CUDA graph uses them each time."""

    def __init__(self, model, mixture, sequences, device):
        self.model, self.mixture = model.to(device), mixture
        self.token = torch.zeros(sequences, dtype=torch.long, device=device)
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        self.caches = self.model.caches(sequences)
        self.graph = self._captured() if device.type == "cuda" else None

    def _captured(self):
        # Memory that is allocated once, such as cuBLAS's, must not be allocated in the graph.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(WARM_UP):
                self._run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._run()
        return graph

    @torch.no_grad()
    def _run(self):
        self.logits = self.model.step(self.token, self.position, self.caches, self.mixture)

    def step(self, token, position):
        """Logits ``[B, characters]`` of the characters after ``token`` ``[B]``."""
        self.token.copy_(token)
        self.position.fill_(position)
        if self.graph is None:
            self._run()
        else:
            self.graph.replay()
        return self.logits.cpu()

    def run(self, given, length):
        """Returns ``[B, length]`` tokens: the ``given`` ones, and the likeliest ones after them.
        Returns the logits of all but the first, too."""
        tokens, logits = given, []
        for position in range(length - 1):
            logits.append(self.step(tokens[:, position], position))
            if position + 1 == tokens.shape[1]:
                tokens = torch.cat((tokens, logits[-1].argmax(-1, keepdim=True)), dim=1)
        return tokens, torch.stack(logits, dim=1)
