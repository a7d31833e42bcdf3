"""Whether an answer contains what was asked for: retrieval from a long text, where the wording around it is free."""

import datasets
import evaluate


class Contains(evaluate.Metric):
    """Share of predictions in which the reference occurs: `evaluate.load("eval/metrics/contains")`."""

    def _info(self):
        return evaluate.MetricInfo(
            description=__doc__,
            citation="",
            inputs_description="predictions, references: lists of strings of equal length",
            features=datasets.Features(
                {"predictions": datasets.Value("string"), "references": datasets.Value("string")}
            ),
        )

    def _compute(self, predictions, references):
        found = [reference in prediction for prediction, reference in zip(predictions, references, strict=True)]
        return {"contains": sum(found) / len(found)}
