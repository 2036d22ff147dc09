"""Writes three models with random weights as GGUF files: large, medium and small, with different costs per token.

Their answers make no sense, but are computed as by any model of the Llama family: prompts become tokens, a cache of keys
and values grows, and a batch of requests costs more than one. The vocabulary is generated from syllables, so that nothing
is downloaded and answers consist of words. A model never ends an answer early: it generates as many tokens as the request
allows, so that a request always costs the same.
"""

import argparse
import pathlib

import gguf
import numpy

CONTEXT = 8192
HEAD = 64
# Name, layers, width, width of the feed-forward network. A layer has 4·width² + 3·width·inner weights.
SIZES = [("large", 12, 768, 2048), ("medium", 8, 512, 1024), ("small", 4, 256, 512)]
CONSONANTS, VOWELS = "bdfgklmnprst", "aeiou"
CHAT = (
    "{% for message in messages %}<s>{{ message['role'] }}: {{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant:{% endif %}"
)


def vocabulary() -> tuple[list[str], list[float], list[gguf.TokenType], int]:
    """Returns tokens, their scores and types in the form of SentencePiece, and the number of words at their end.

    The tokenizer begins with characters and joins the two neighbours whose union has the best score, so each word consists
    of two parts that are tokens themselves.
    """
    control = ["<unk>", "<s>", "</s>"]
    raw = [f"<0x{byte:02X}>" for byte in range(256)]
    characters = ["\u2581"] + [chr(code) for code in range(0x21, 0x7F)]
    syllables = [consonant + vowel for consonant in CONSONANTS for vowel in VOWELS]
    pairs = [first + second for first in syllables for second in syllables[:: len(VOWELS) + 2]]
    words = ["\u2581" + word for word in syllables + pairs]
    parts = characters + syllables + pairs
    types = [gguf.TokenType.UNKNOWN] + [gguf.TokenType.CONTROL] * 2 + [gguf.TokenType.BYTE] * len(raw)
    types += [gguf.TokenType.NORMAL] * (len(parts) + len(words))
    # Longer tokens are preferred to shorter ones, and earlier to later.
    joined = parts + words
    scores = [0.0] * (len(control) + len(raw)) + [len(token) - at / len(joined) for at, token in enumerate(joined)]
    return control + raw + joined, scores, types, len(words)


def write(path: pathlib.Path, layers: int, width: int, inner: int, seed: int) -> None:
    """Writes one model."""
    random = numpy.random.default_rng(seed)
    tokens, scores, types, words = vocabulary()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(f"random {path.stem}")
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_F16)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(width // HEAD)
    writer.add_head_count_kv(width // HEAD)
    writer.add_rope_dimension_count(HEAD)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(True)
    writer.add_chat_template(CHAT)

    def matrix(rows: int, columns: int) -> numpy.ndarray:
        values = random.standard_normal((rows, columns), dtype=numpy.float32) / numpy.sqrt(columns)
        return values.astype(numpy.float16)

    ones = numpy.ones(width, dtype=numpy.float32)
    writer.add_tensor("token_embd.weight", matrix(len(tokens), width))
    # Answers contain only words: with rows of zeros, the end of an answer and all other tokens are never among the best.
    output = 4 * matrix(len(tokens), width)
    output[: len(tokens) - words] = 0
    writer.add_tensor("output.weight", output)
    writer.add_tensor("output_norm.weight", ones)
    for layer in range(layers):
        for norm in ("attn_norm", "ffn_norm"):
            writer.add_tensor(f"blk.{layer}.{norm}.weight", ones)
        for part in ("attn_q", "attn_k", "attn_v", "attn_output"):
            writer.add_tensor(f"blk.{layer}.{part}.weight", matrix(width, width))
        for part in ("ffn_gate", "ffn_up"):
            writer.add_tensor(f"blk.{layer}.{part}.weight", matrix(inner, width))
        writer.add_tensor(f"blk.{layer}.ffn_down.weight", matrix(width, inner))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=pathlib.Path)
    options = parser.parse_args()
    for seed, (name, layers, width, inner) in enumerate(SIZES):
        path = options.folder / f"{name}.gguf"
        write(path.with_suffix(".new"), layers, width, inner, seed)
        path.with_suffix(".new").rename(path)
        print(f"{path}: {path.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
