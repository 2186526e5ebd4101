"""Rebuild the demo model's tokenizer: `python -m benchmarks.train_demo_tokenizer [directory]`.

A byte-level BPE of 4,096 tokens, trained on text that this file makes up from its own word lists: plain sentences,
questions, source code, JSON, tables and numbers. No foreign text and no foreign model is involved. The pipeline has
the parts that current chat models have (NFC, a splitting pattern, byte-level, added special tokens), so that what the
simulated engines and the gateway do with it is what they do with a real one. The seed is fixed: two runs write the
same bytes.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SEED = 20
VOCABULARY = 4096
MODEL_MAX_LENGTH = 131_072
DIRECTORY = Path(__file__).parents[1] / "gateway" / "sim" / "model"

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MARKERS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")

# Contractions, a word with at most one leading sign, single digits, runs of signs, line ends, blanks.
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def words(text: str) -> list[str]:
    """The words of a text, in order."""
    return text.split()


GLUE = words("""
the of and to in a is that it for on with as at by from this be are was or an not have has can will if when which
their its they you we your our he she his her there then than but so because while after before between through
into over under about only also more most some any each every other another such no one two three first last next
what how why where who may might must should could would do does did been being were had here now very just both
""")

NOUNS = words("""
answer question system user assistant message model token block prefix cache worker request response server client
engine fleet route score queue load time second minute hour day week month year number value name list table line
word sentence paragraph page book letter story report note idea reason result problem solution example case part
piece group team person people child friend teacher student doctor driver farmer writer reader player city town
village street house room door window wall floor garden field forest river lake sea mountain valley island bridge
road train ship plane car bicycle wheel machine tool paper pen table chair lamp phone screen keyboard computer
network memory disk file folder function method class module package library test build error warning log metric
graph tree node edge path key hash index record field event stream chunk byte bit character string integer float
price cost market shop company office bank money account order invoice contract customer product service offer
morning evening night winter summer spring autumn weather rain snow wind storm cloud sun moon star light shadow
colour red blue green white black yellow water fire earth air stone metal wood glass bread milk cheese apple orange
dinner lunch breakfast kitchen recipe salt sugar oil butter knife spoon plate cup bottle coffee tea garden flower
animal dog cat horse bird fish cow sheep bear wolf fox mouse body hand arm leg foot head eye ear nose mouth heart
music song film picture game sport football tennis school university lesson exam science history language law
government country border war peace president minister party election citizen police court judge law tax work job
plan project goal step phase stage change difference rule limit budget risk chance choice decision measure unit
temperature pressure distance speed weight length height width size area volume energy power force field wave
""")

VERBS = words("""
ask answer say tell speak write read explain describe show hide find look see watch hear listen think know learn
teach remember forget believe hope want need like love hate make build create design develop change move carry bring
send receive take give keep hold store load save open close start stop begin finish end continue wait run walk jump
fall rise grow shrink increase reduce improve break fix repair test check measure count compare choose decide plan
order buy sell pay cost spend earn win lose play work help support use apply return call connect route forward parse
render encode decode hash match search sort filter join split merge copy delete insert update evict fill drain cook
eat drink sleep travel drive fly swim visit stay leave arrive reach follow lead meet join share discuss agree
""")

ADJECTIVES = words("""
good bad new old big small long short high low fast slow hot cold warm cool early late easy hard simple complex
clear dark bright quiet loud open closed full empty free busy rich poor strong weak young main local global public
private common rare real exact rough safe dangerous clean dirty dry wet soft sharp deep shallow wide narrow round
flat happy sad angry calm careful quick certain possible impossible important useful different similar equal
special general recent current final single double whole half ready lazy fair steady shared single random stable
""")

NAMES = words("""
Anna Ben Carla David Emma Frank Greta Henry Ida Jonas Karin Lukas Maria Nils Olga Peter Rosa Simon Tina Victor
Berlin Paris London Madrid Rome Vienna Oslo Lisbon Dublin Athens Tokyo Delhi Cairo Lima Boston Denver
Monday Tuesday Wednesday Thursday Friday Saturday Sunday January February March April June July August September
October November December
""")

FOREIGN = words("""
und der die das nicht eine für über müssen können größe straße les des une pour être avec déjà où el los una para
más también señor año così perché città för från där här não são coração também już być że się można это как для
что она они если 你好 世界 请 问题 回答 模型 こんにちは ありがとう 質問 안녕하세요
""")

KINDS = ("int", "str", "float", "bool", "bytes", "list[int]", "dict[str, object]", "None")


class Writer:
    """Makes up text; every choice comes from one seeded source."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def documents(self, count: int) -> Iterator[str]:
        """`count` documents, of all kinds in turn."""
        kinds = (self.prose, self.prose, self.dialogue, self.code, self.json, self.listing, self.foreign)
        for position in range(count):
            yield kinds[position % len(kinds)]()

    def prose(self) -> str:
        """Three to eight sentences."""
        return " ".join(self.sentence() for _ in range(self._random.randint(3, 8)))

    def sentence(self) -> str:
        """One sentence, capital at the front and a sign at the end."""
        pick, chance = self._random.choice, self._random.random
        words: list[str] = []
        for _ in range(self._random.randint(1, 3)):
            words.append(pick(GLUE))
            if chance() < 0.5:
                words.append(pick(ADJECTIVES))
            words.append(pick(NAMES) if chance() < 0.1 else self._noun())
            words.append(self._verb())
            words.append(pick(GLUE))
            words.append(self._noun() + (pick((",", ";", ":")) if chance() < 0.15 else ""))
            if chance() < 0.1:
                words.append(pick(("don't", "it's", "we'll", "they're", "can't", "I'm", "that's", "you've")))
            if chance() < 0.1:
                words.append(str(self._random.randint(0, 9999)))
        text = " ".join(words)
        return text[0].upper() + text[1:] + pick((".", ".", ".", "?", "!"))

    def dialogue(self) -> str:
        """Questions and answers."""
        lines = []
        for _ in range(self._random.randint(2, 4)):
            lines.append(f"Q: {self.sentence()}\nA: {self.sentence()}\n")
        return "\n".join(lines)

    def code(self) -> str:
        """A function in the style of this project."""
        pick = self._random.choice
        name, first, second = (f"{pick(VERBS)}_{pick(NOUNS)}" for _ in range(3))
        lines = [
            f"def {name}(self, {first}: {pick(KINDS)}, *, {second}: {pick(KINDS)}) -> {pick(KINDS)}:",
            f'    """{self.sentence()}"""',
            f"    if {first} is None or not {second}:",
            f'        raise ValueError("{pick(NOUNS)} {pick(GLUE)} {pick(NOUNS)}")',
            f"    for {pick(NOUNS)} in self._{pick(NOUNS)}s:",
            f"        {pick(NOUNS)} = {first}.get({second}, {self._number()})  # {pick(GLUE)} {pick(NOUNS)}",
            f"        self.{pick(NOUNS)} += len({pick(NOUNS)}) * 2",
            f"    return {pick(NOUNS)}\n",
            f"class {pick(NOUNS).title()}{pick(NOUNS).title()}:",
            f"    {pick(NOUNS)}: {pick(KINDS)} = {self._random.random():.3f}\n",
        ]
        return "\n".join(lines)

    def json(self) -> str:
        """An object as tools and tool calls have it."""
        pick = self._random.choice
        properties = {
            pick(NOUNS): {"type": pick(("string", "integer", "number", "boolean")), "description": self.sentence()}
            for _ in range(self._random.randint(1, 4))
        }
        tool = {
            "type": "function",
            "function": {
                "name": f"{pick(VERBS)}_{pick(NOUNS)}",
                "description": self.sentence(),
                "parameters": {"type": "object", "properties": properties, "required": list(properties)},
            },
        }
        call = {"name": f"{pick(VERBS)}_{pick(NOUNS)}", "arguments": {pick(NOUNS): self._random.randint(0, 99)}}
        return json.dumps(tool, indent=pick((None, 2))) + "\n" + json.dumps(call)

    def listing(self) -> str:
        """A heading, a list and a table."""
        pick = self._random.choice
        lines = [f"## {pick(ADJECTIVES).title()} {pick(NOUNS)}\n"]
        lines += [f"{n}. **{pick(NOUNS).title()}**: {self.sentence()}" for n in range(1, self._random.randint(3, 6))]
        lines += [f"| {pick(NOUNS)} | {pick(ADJECTIVES)} | {self._random.randint(0, 99999)} |" for _ in range(3)]
        return "\n".join(lines) + "\n"

    def foreign(self) -> str:
        """Words of other languages, so that common letters beyond ASCII are not bytes only."""
        return " ".join(self._random.choice(FOREIGN) for _ in range(30))

    def _noun(self) -> str:
        return self._random.choice(NOUNS) + ("s" if self._random.random() < 0.3 else "")

    def _number(self) -> int:
        return self._random.randint(0, 512)

    def _verb(self) -> str:
        verb = self._random.choice(VERBS)
        ending = self._random.choice(("", "", "s", "ed", "ing"))
        return (verb[:-1] if ending in ("ed", "ing") and verb.endswith("e") else verb) + ending


def train() -> Tokenizer:
    """The tokenizer, trained anew; takes some seconds."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(MARKERS),
        special_tokens=[AddedToken(text, special=True, normalized=False) for text in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(Writer(SEED).documents(21_000), trainer)
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKERS])
    return tokenizer


def main(directory: Path = DIRECTORY) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`; the chat template beside them is written by hand."""
    tokenizer = train()
    directory.mkdir(parents=True, exist_ok=True)
    # One line: a third of the size of the indented form.
    (directory / "tokenizer.json").write_text(tokenizer.to_str(pretty=False), encoding="utf-8")
    settings = {
        "add_bos_token": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "model_max_length": MODEL_MAX_LENGTH,
        "pad_token": "<|endoftext|>",
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    print(f"{tokenizer.get_vocab_size()} tokens -> {directory}")


if __name__ == "__main__":
    main(*(Path(argument) for argument in sys.argv[1:2]))
