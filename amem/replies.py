"""Replies of a run: asked turn by turn, kept as soon as they come, taken from the folder ever after.

`turns/NNN.reply.json` holds the exchanges of a turn until its turn file does. A reply that is in a run folder is never
paid for again: neither after a kill, nor by `--resume`, nor by `--replay`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from amem import ask, embed, llm, runs
from amem.ask import Exchange
from amem.embed import Embedder
from amem.extract import Drafts
from amem.notes import Turn

GIVE_UP = 16  # turns in a row without any reply, after which the endpoint is asked no more
BATCH = 16  # turns whose notes are embedded together


def reply_file(folder: Path, number: int, total: int) -> Path:
    """Where the exchanges of a turn lie until its turn file is written; number and total as for `runs.turn_file`."""
    return runs.turn_file(folder, number, total).with_suffix(".reply.json")


class Desk:
    """Gets the exchanges of turns: from the folder, else from `client`; without one, what is not there has failed."""

    def __init__(self, folder: Path, total: int, client: llm.Client | None) -> None:
        self.folder, self.total, self.client = folder, total, client
        self._lock, self._silent = threading.Lock(), 0

    def drafts(self, turns: list[tuple[int, Turn]], events: Mapping[str, str], embedder: Embedder) -> Iterator[Drafts]:
        """Notes of numbered turns with their vectors, in their order, while up to `client.concurrency` requests run.

        What is ready is embedded together, which takes half the time.
        """
        # Only where that changes no bit of a vector: with other embedders a note would hang on the timing of replies.
        most = BATCH if embedder.name == embed.DEFAULT else 1
        told = iter(turns)
        ready: Iterable[list[list[Exchange]]] = ([self.exchanges(turn)] for turn in turns)
        if self.client:
            ready = self.client.in_order(self.exchanges, turns, most)
        for some in ready:
            made = [ask.drafts(next(told)[1], exchanges, events) for exchanges in some]
            vectors = embedder.encode_document([note.content for one in made for note in one.notes])
            start = 0
            for one in made:
                yield one._replace(vectors=vectors[start : start + len(one.notes)])
                start += len(one.notes)

    def exchanges(self, numbered: tuple[int, Turn]) -> list[Exchange]:
        """All exchanges about one turn, oldest first; each new reply is in the folder before anything else is done."""
        number, turn = numbered
        path = reply_file(self.folder, number, self.total)
        asked, settled = self._kept(number)
        model = self.client.model if self.client else "(none)"
        while (request := ask.next_request(turn, asked[settled:], model)) is not None:
            exchange = self._send(request)
            asked.append(exchange)
            if exchange["raw_reply"] is not None:
                _keep(path, asked, settled)
        return asked

    def _kept(self, number: int) -> tuple[list[Exchange], int]:
        """The exchanges of a turn that the folder holds, and how many of them are to be followed by a new beginning."""
        path = reply_file(self.folder, number, self.total)
        if path.exists():
            kept = runs.read_json(path)
            return kept["asked"], kept["settled"]
        path = runs.turn_file(self.folder, number, self.total)
        if not path.exists():
            return [], 0
        body = runs.read_json(path)
        asked = recorded(body)
        return asked, len(asked) if body["failed"] and self.client else _begin(asked)

    def _send(self, request: dict[str, Any]) -> Exchange:
        nothing = {"request": request, "raw_reply": None}
        if self.client is None:
            return {**nothing, "error": "no reply is recorded for this turn; set an endpoint and resume the run"}
        if self._silent >= GIVE_UP:
            return {**nothing, "error": f"not asked: {self.client.endpoint} gave no reply to {GIVE_UP} turns in a row"}
        try:
            reply = self.client.complete(request)
        except llm.ModelError as error:
            with self._lock:
                self._silent += 1
            return {**nothing, "error": str(error)}
        with self._lock:
            self._silent = 0
        return {"request": request, "raw_reply": reply}


def check_recorded(folder: Path, numbers: list[int], total: int) -> None:
    """Raise ModelError when a turn of these numbers has no recorded reply: without an endpoint it cannot be made."""
    places = {n: (reply_file(folder, n, total), runs.turn_file(folder, n, total)) for n in numbers}
    unknown = [number for number, paths in places.items() if not any(path.exists() for path in paths)]
    if unknown:
        raise llm.ModelError(
            f"{folder}: the notes of this run are made by a model, and {len(unknown)} turns have no reply yet (the "
            f"first is {unknown[0]}); set OPENAI_API_KEY or OPENAI_BASE_URL and AMEM_MODEL, then --resume {folder}"
        )


def recorded(body: dict[str, Any]) -> list[Exchange]:
    """The exchanges in a turn file, oldest first."""
    last = {"request": body["request"], "raw_reply": body["raw_reply"]}
    return [*body["earlier"], last if body["raw_reply"] is not None else {**last, "error": body["errors"][-1]}]


def failed(folder: Path) -> list[str]:
    """Ids of the turns of a run that have failed, in order."""
    return [body["turn"]["id"] for body in runs.turn_bodies(folder) if body.get("failed")]


def reopen(folder: Path) -> None:
    """Take a run back to its replies, to make its notes anew; turns that have failed will be asked again.

    Notes hang on those before them, so a turn that comes late is not put in between: the memory is rebuilt, at no
    cost. May be broken off and done again at any point.
    """
    runs.write_json(folder / runs.MANIFEST, {**runs.read_json(folder / runs.MANIFEST), "state": "running"})
    for end in ("-wal", "-shm", ""):  # a log without its database would be taken for that of the next one
        (folder / f"{runs.DATABASE}{end}").unlink(missing_ok=True)


def copy(source: Path, folder: Path, turns: list[Turn]) -> None:
    """Put the recorded replies of the run `source` into `folder`, for those of `turns` that are not there yet."""
    told = {body["turn"]["id"]: body for body in runs.turn_bodies(source)}
    for number, turn in enumerate(turns, 1):
        body = told.get(turn.id)
        there = runs.turn_file(folder, number, len(turns)).exists()
        if body and not there and Turn.model_validate(body["turn"]) == turn:
            exchanges = recorded(body)
            _keep(reply_file(folder, number, len(turns)), exchanges, _begin(exchanges))


def _begin(exchanges: list[Exchange]) -> int:
    return max(i for i, exchange in enumerate(exchanges) if not ask.is_repeat(exchange["request"]))


def _keep(path: Path, exchanges: list[Exchange], settled: int) -> None:
    # On one line, which is quicker: until it is written, a kill costs the reply.
    text = json.dumps({"settled": settled, "asked": exchanges}, ensure_ascii=False)
    runs.write_bytes(path, text.encode() + b"\n")


def account(folder: Path) -> dict[str, Any]:
    """What the turns of a finished run say for its manifest: who made the notes, usage, what failed or was dropped."""
    engines: dict[str, None] = {}
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "requests": 0}
    story = runs.read_json(folder / runs.RESPONSE)
    replies: list[dict[str, Any]] = [] if story.get("sent") is False else [story]
    lost: list[dict[str, Any]] = []
    repaired = dropped = 0
    for body in runs.turn_bodies(folder):
        if body["raw_reply"] is not None:
            engines[body["engine"]] = None
        replies += [exchange["raw_reply"] for exchange in recorded(body) if exchange["raw_reply"] is not None]
        repaired, dropped = repaired + len(body["repaired"]), dropped + len(body["dropped"])
        if body["failed"]:
            lost.append({"turn": body["turn"]["id"], "error": body["errors"][-1]})
    for reply in replies:
        for name, count in llm.tokens_of(reply).items():
            usage[name] += count
    return {
        "notes_made_by": ", ".join(engines) or "model (no reply came)",
        "usage": {**usage, **_cost(usage)},
        "failed": lost,
        "counts": {"failed_turns": len(lost), "repaired": repaired, "dropped": dropped},
    }


def _cost(usage: dict[str, int]) -> dict[str, float]:
    """{"cost": ...} by AMEM_PRICE_IN and AMEM_PRICE_OUT, the prices of a million tokens; empty without both."""
    prices = [llm.number_from_env(name) for name in ("AMEM_PRICE_IN", "AMEM_PRICE_OUT")]
    if None in prices:
        return {}
    tokens = (usage["prompt_tokens"], usage["completion_tokens"])
    return {"cost": round(sum(n * (p or 0.0) / 1e6 for n, p in zip(tokens, prices, strict=True)), 6)}
