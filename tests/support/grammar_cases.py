"""Schemas and grammars, and the processors that users make of them with each library."""

import importlib.util
import json
import re
from functools import cache

import torch
from transformers.generation.logits_process import PrefixConstrainedLogitsProcessor

from hf_specx import DraftTargetPair


def _object(**properties: object) -> str:
    made = {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}
    return json.dumps(made)


TEXT, WHOLE, FLAG = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
SHORT = {"type": "string", "maxLength": 8}
NESTED = json.loads(_object(street=SHORT, number=WHOLE))
SCHEMAS = {
    "flat": _object(name=SHORT, age=WHOLE),
    "nested": _object(name=SHORT, address=NESTED),
    "enum": _object(colour={"enum": ["red", "green", "dark blue"]}, size={"enum": ["small", "large"]}),
    "numbers": _object(width={"type": "number"}, height=WHOLE, exact=FLAG),
    "escapes": _object(quote=TEXT),
    "array": _object(tags={"type": "array", "items": {"enum": ["a", "bc"]}, "minItems": 2, "maxItems": 4}),
    "constants": _object(kind={"const": "measurement of the temperature"}, unit={"const": "degrees Celsius"}, ok=FLAG),
    "objects": _object(points={"type": "array", "items": json.loads(_object(x=WHOLE, y=WHOLE)), "maxItems": 2}),
}
REGEXES = {
    "date": r"(19|20)[0-9]{2}-[01][0-9]-[0-3][0-9]",
    "words": r"(the|a) (cat|dog) (sat|ran)( and (sat|ran))?\.",
    "endless": r"[a-z ]+",
}
GRAMMARS = {"context-free": 'root ::= "(" inner ")"\ninner ::= "" | "(" inner ")" inner | [a-c] inner'}
LARK = {"context-free": 'start: "(" inner ")"\ninner: "" | "(" inner ")" inner | /[a-c]/ inner'}
CASES = [*SCHEMAS, *REGEXES, *GRAMMARS]
# parts of a text that is free otherwise; the word that begins a call is one that the pair in the package writes often
CALL_BEGIN, CALL_END, THINK_END = "import", ";", "</think>"
TAGS = ["calls", "after thinking", "after thinking of a length"]
LIBRARIES = {
    "xgrammar": "xgrammar",
    "outlines": "outlines",
    "outlines xgrammar": "outlines",
    "outlines llguidance": "outlines",
    "prefix function": "",
}


def installed(library: str) -> bool:
    needed = {LIBRARIES[library], *library.split()} & {"xgrammar", "outlines", "llguidance"}
    return all(importlib.util.find_spec(name) for name in needed)


@cache
def pair() -> DraftTargetPair:
    """That of the package in float32, also its head: in bfloat16 rounding depends on the number of rows."""
    embedded = DraftTargetPair.embedded(dtype=torch.float32)
    embedded.draft.float()
    return embedded


@cache
def vocabulary() -> int:
    return pair().target.config.vocab_size


@cache
def _xgrammar_compiler():
    import xgrammar

    info = xgrammar.TokenizerInfo.from_huggingface(pair().tokenizer, vocab_size=vocabulary())
    return xgrammar.GrammarCompiler(info)


@cache
def _compiled(case: str):
    compiler = _xgrammar_compiler()
    if case in SCHEMAS:
        return compiler.compile_json_schema(SCHEMAS[case], any_whitespace=False)
    return compiler.compile_regex(REGEXES[case]) if case in REGEXES else compiler.compile_grammar(GRAMMARS[case])


@cache
def _outlines(backend: str):
    import outlines
    from outlines.backends import _get_backend

    return _get_backend(backend, outlines.from_transformers(pair().target, pair().tokenizer))


def _structural_tag(case: str) -> dict:
    """A structural tag of xgrammar."""
    content = {"type": "json_schema", "json_schema": json.loads(SCHEMAS["constants"])}
    if case == "calls":
        call = {"begin": CALL_BEGIN, "content": content, "end": CALL_END}
        return {
            "type": "structural_tag",
            "format": {"type": "triggered_tags", "triggers": [CALL_BEGIN], "tags": [call]},
        }
    thinking = {"type": "any_text"} | ({"max_tokens": 6} if case.endswith("length") else {})
    elements = [{"type": "tag", "begin": "", "content": thinking, "end": THINK_END}, content]
    return {"type": "structural_tag", "format": {"type": "sequence", "elements": elements}}


def _struct_tag() -> str:
    """The same of llguidance, for calls."""
    from llguidance import StructTag

    schema = json.loads(SCHEMAS["constants"])
    call = StructTag(trigger=CALL_BEGIN, begin=CALL_BEGIN, grammar=schema, end=CALL_END)
    return StructTag.to_grammar([call], assume_special=False)


def make_tags(library: str, case: str):
    """A processor for one of `TAGS`, as a user makes it."""
    if library == "xgrammar":
        from xgrammar.contrib.hf import LogitsProcessor

        return LogitsProcessor(_xgrammar_compiler().compile_structural_tag(_structural_tag(case)))
    from outlines.backends.llguidance import LLGuidanceLogitsProcessor

    return LLGuidanceLogitsProcessor(_struct_tag(), _outlines("llguidance").llg_tokenizer, "torch")


def able(library: str, case: str) -> bool:
    """Whether a library takes this kind of grammar."""
    return not (case in GRAMMARS and library in ("outlines", "prefix function"))


@cache
def _automaton(case: str):
    """What a prefix function knows: allowed tokens and next states of a regular expression, by outlines-core."""
    backend = _outlines("outlines_core")
    made = backend.get_json_schema_logits_processor(SCHEMAS[case]) if case in SCHEMAS else None
    made = backend.get_regex_logits_processor(REGEXES[case]) if made is None else made
    return made.index


def prefix_function(case: str, width: int):
    """A pure function of the text, of which the first `width` tokens are the prompt."""
    index = _automaton(case)
    transitions = index.get_transitions()

    def allowed(row: int, text: torch.Tensor) -> list[int]:
        state = index.get_initial_state()
        for token in text[width:].tolist():
            state = transitions[state].get(token, state)
        return sorted(transitions.get(state, {0: state}))

    return allowed


def make(library: str, case: str, width: int = 0):
    """A processor as a user makes it.

    Args:
        width: columns of the prompt, for a prefix function.
    """
    if library == "xgrammar":
        from xgrammar.contrib.hf import LogitsProcessor

        return LogitsProcessor(_compiled(case))
    if library == "prefix function":
        return PrefixConstrainedLogitsProcessor(prefix_function(case, width), 1)
    backend = _outlines({"outlines": "outlines_core"}.get(library, library.split()[-1]))
    if case in SCHEMAS:
        return backend.get_json_schema_logits_processor(SCHEMAS[case])
    if case in REGEXES:
        return backend.get_regex_logits_processor(REGEXES[case])
    return backend.get_cfg_logits_processor(LARK[case] if "llguidance" in library else GRAMMARS[case])


def valid(case: str, text: str) -> bool:
    """Whether a text that has ended is of the language of its case; of a context-free one, whether it is balanced."""
    if case in REGEXES:
        return re.fullmatch(REGEXES[case], text) is not None
    if case in GRAMMARS:
        return text.count("(") == text.count(")") and set(text) <= set("()abc")
    value = json.loads(text)
    return set(value) == set(json.loads(SCHEMAS[case])["required"])
