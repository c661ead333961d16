"""The text that the example's tokenizer and model are trained on: questions and answers."""

PAIRS = (
    ("What is a checkpoint?", "A checkpoint is the state of a model, saved to disk."),
    ("What is a shard?", "A shard is the part of a tensor that one rank holds."),
    ("What is a rank?", "A rank is one process of a training run."),
    ("What is tensor parallelism?", "It splits each matrix over several ranks."),
    ("What is pipeline parallelism?", "It gives each rank some of the layers."),
    ("What is an expert?", "An expert is one of many small networks in a layer."),
    ("What is a router?", "A router sends each token to a few experts."),
    ("What is a tokenizer?", "A tokenizer turns text into numbers and back."),
    ("What is a logit?", "A logit is the score of one token before softmax."),
    ("What is a norm?", "A norm keeps the size of a vector near one."),
    ("What is a query?", "A query asks each key how well it fits."),
    ("What is a key?", "A key answers how well it fits a query."),
    ("What is a value?", "A value is what attention adds up."),
    ("What is a gate?", "A gate says how much of a signal may pass."),
    ("What is padding?", "Padding is rows that no token ever uses."),
    ("What is a manifest?", "A manifest lists what was read and what was written."),
    ("What is a plan?", "A plan says which bytes are copied where."),
    ("What is a header?", "A header names the tensors of a file."),
    ("What is an index?", "An index says which file holds each tensor."),
    ("What is a stage?", "A stage reads a directory and writes another one."),
    ("Who trains the model?", "Megatron trains the model on many ranks."),
    ("Who serves the model?", "The server answers requests for the model."),
    ("Who checks the model?", "The validator compares its logits with the original."),
    ("Who merges the shards?", "The converter merges the shards without loss."),
    ("Why compare logits?", "Equal logits show that it is still the same model."),
    ("Why copy bytes?", "Bytes that are copied cannot be rounded."),
    ("Why stop on errors?", "A silent error costs more than a stop."),
    ("Why write the manifest last?", "A directory without it is not finished."),
    ("Hello!", "Hello! Ask me about checkpoints."),
    ("Thank you.", "You are welcome."),
)

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPECIAL = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")


def dialogue(question: str, answer: str) -> str:
    """One exchange as the chat template writes it."""
    return f"<|user|>{question}<|end|><|assistant|>{answer}<|end|>"
