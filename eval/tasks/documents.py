"""What the tasks beside this file consist of: rows of `data/`, and texts with a needle, made when they are asked for.

lm-eval calls these with the model's arguments and `--metadata` as keywords; paths do not depend on the folder it runs in.
"""

from __future__ import annotations

import functools
import random
from pathlib import Path

import datasets
import evaluate

HERE = Path(__file__).parent
CITIES = ("Lisbon", "Vienna", "Oslo", "Cairo", "Lima", "Kyoto", "Dublin", "Prague")
DEPTHS = (0.05, 0.35, 0.65, 0.95)  # of the text, before the needle

# Haystack sentences: every combination is a true-sounding sentence about nothing that is asked for.
PEOPLE = ("The gardener", "An old sailor", "The teacher", "My neighbour", "A young doctor", "The librarian", "Our cook")
DEEDS = ("looked for", "repaired", "painted", "talked about", "carried home", "forgot", "wrote a song about")
THINGS = ("a wooden ladder", "the blue bicycle", "a basket of pears", "the garden gate", "an umbrella", "the clock")
TIMES = ("on a rainy morning", "before breakfast", "in the first days of March", "after the concert", "last winter")


def load(files: dict[str, str], **settings) -> datasets.DatasetDict:
    """Splits from files of `data/`, one JSON object a line."""
    return datasets.load_dataset("json", data_files={split: str(HERE / "data" / name) for split, name in files.items()})


def needles(needle_words: int = 350, **settings) -> dict[str, datasets.Dataset]:
    """Texts of about `needle_words` words; every city's number is hidden at one of the depths, each depth in turn."""
    draw = random.Random(0)
    rows = [_needle(city, depth, needle_words, draw) for depth in DEPTHS for city in CITIES]
    return {"test": datasets.Dataset.from_list(draw.sample(rows, len(rows)))}


def _needle(city: str, depth: float, words: int, draw: random.Random) -> dict:
    sentences: list[str] = []
    while sum(len(sentence.split()) for sentence in sentences) < words:
        sentences.append(f"{draw.choice(PEOPLE)} {draw.choice(DEEDS)} {draw.choice(THINGS)} {draw.choice(TIMES)}.")
    number = str(draw.randrange(10000, 100000))
    sentences.insert(int(depth * len(sentences)), f"The secret number of {city} is {number}.")
    return {"text": " ".join(sentences), "city": city, "number": number, "depth": depth}


def contains(references: list[str], predictions: list[str]) -> float:
    """Share of predictions that contain their reference."""
    return _metric().compute(references=references, predictions=predictions)["accuracy"]


@functools.cache
def _metric() -> evaluate.Metric:
    return evaluate.load(str(HERE.parent / "metrics" / "answer_accuracy"), keep_in_memory=True)
