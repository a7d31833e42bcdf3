"""Share of answers that contain what was asked for, with a Wilson interval: a metric for `evaluate.load(<this folder>)`."""

import statistics

import datasets
import evaluate

DESCRIPTION = """An answer is right where its reference appears in it, spaces aside. The interval is Wilson's score interval
(1927), which stays inside 0 and 1 and says something even where every answer is right."""

ARGUMENTS = """
Args:
    predictions: answers.
    references: what each must contain.
    confidence: of the interval, 0.95 if left out.
Returns:
    accuracy, low, high: the share of right answers and its interval (0, 0, 1 of no answer).
    right, n: right answers and all.
"""


class AnswerAccuracy(evaluate.Metric):
    """Counts, computed on the machine at hand: nothing is fetched."""

    def _info(self):
        text = datasets.Value("string")
        return evaluate.MetricInfo(
            description=DESCRIPTION,
            citation="",
            inputs_description=ARGUMENTS,
            features=datasets.Features({"predictions": text, "references": text}),
        )

    def _compute(self, predictions, references, confidence=0.95):
        pairs = zip(predictions, references, strict=True)
        right, n = sum(_bare(wanted) in _bare(answer) for answer, wanted in pairs), len(predictions)
        low, high = wilson(right, n, confidence)
        return {"accuracy": right / n if n else 0.0, "low": low, "high": high, "right": right, "n": n}


def _bare(text):
    return "".join(text.split())


def wilson(right, n, confidence=0.95):
    """The score interval of a share: the probabilities under which `right` of `n` is not surprising."""
    if n == 0:
        return 0.0, 1.0
    z = statistics.NormalDist().inv_cdf((1 + confidence) / 2)
    share, weight = right / n, z * z / n
    middle = (share + weight / 2) / (1 + weight)
    half = z / (1 + weight) * (share * (1 - share) / n + weight / (4 * n)) ** 0.5
    return max(0.0, middle - half), min(1.0, middle + half)
