"""Make ``examples/tokenizer`` and ``examples/calibration.jsonl``.

    python examples/make_tokenizer.py

A byte-level BPE of 370 tokens with a chat template, trained on ``text.py``. Needs tokenizers.
"""

from __future__ import annotations

import json
from pathlib import Path

from text import CHAT_TEMPLATE, PAIRS, SPECIAL
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

HERE = Path(__file__).parent
VOCABULARY = 370


def main() -> None:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([text for pair in PAIRS for text in pair], trainer)
    place = HERE / "tokenizer"
    place.mkdir(exist_ok=True)
    tokenizer.save(str(place / "tokenizer.json"))
    write_json(
        place / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": "<|pad|>",
            "eos_token": "<|end|>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": 256,
        },
    )
    (place / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL}
    write_json(
        place / "generation_config.json",
        {"eos_token_id": [ids["<|end|>"]], "pad_token_id": ids["<|pad|>"]},
    )
    lines = [json.dumps({"text": f"{question} {answer}"}) for question, answer in PAIRS]
    (HERE / "calibration.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def write_json(file: Path, content: object) -> None:
    file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
