"""From the text of C-like statements to a tree.

In: `float t = x - y; z = t * t`, and the names and types that it may use. Out: assignments of expressions, names
resolved: each is a parameter, a local variable or a constant that is known at that place. What the notation of C and
CuPy has beyond that is an UnsupportedError that says so.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from dnnc.array.notation import (
    ARITY,
    C_TYPES,
    CONSTANTS,
    DTYPES,
    LEVELS,
    STATEMENTS,
    TYPE_WORDS,
    Assignment,
    Cast,
    Expression,
    Name,
    Number,
    Operation,
    Source,
    Token,
    tokens,
)  # fmt: skip
from dnnc.ir.errors import DnncError


@dataclass(slots=True)
class Parser:
    """Parser of one text. `readable` are names with a value here, `writable` assignable ones and their types."""

    source: Source
    readable: set[str]
    writable: dict[str, str]
    variables: Collection[str]
    ahead: list[Token] = field(init=False)
    k: int = 0

    def __post_init__(self) -> None:
        self.ahead = tokens(self.source)

    @property
    def token(self) -> Token:
        return self.ahead[self.k]

    def next(self) -> Token:
        self.k += 1
        return self.ahead[self.k - 1]

    def accept(self, *marks: str) -> Token | None:
        return self.next() if self.token.kind == "mark" and self.token.text in marks else None

    def expect(self, mark: str) -> Token:
        found = self.accept(mark)
        if found is None:
            raise self.unexpected(repr(mark))
        return found

    def unexpected(self, expected: str) -> DnncError:
        t = self.token
        if t.text in ("[", "]"):
            return self.source.unsupported(
                t.at, "elements cannot be indexed: a kernel sees one element of each parameter at a time"
            )
        if t.text in (".", "->", "::"):
            return self.source.unsupported(
                t.at,
                f"{t.text!r}: there are no members and no namespaces; functions of mathematics have their plain names",
            )
        if t.text in ("++", "--"):
            return self.source.unsupported(t.at, f"{t.text!r} is not supported: use {t.text[0]}= 1")
        return self.source.error(
            t.at, f"expected {expected}, got {t.text!r}" if t.text else f"expected {expected}, but the text ends"
        )

    def type_here(self) -> tuple[str, int] | None:
        """The type whose name stands here and how many words it has. Nothing is consumed."""
        words: list[str] = []
        while self.ahead[self.k + len(words)].text in TYPE_WORDS:
            words.append(self.ahead[self.k + len(words)].text)
        if words:
            name = " ".join(words)
            if name not in C_TYPES:
                raise self.source.error(self.token.at, f"there is no type {name!r}")
            return C_TYPES[name], len(words)
        word = self.token.text
        return (word, 1) if word in DTYPES or word in self.variables else None

    def no_pointer(self) -> None:
        if self.token.text in ("*", "&"):
            raise self.source.unsupported(self.token.at, "there are no pointers and no references")

    # --- statements ---------------------------------------------------------------------------------------------------

    def statements(self) -> list[Assignment]:
        out: list[Assignment] = []
        while self.token.kind != "end":
            if self.accept(";"):
                continue
            out += self.statement()
            if self.token.kind != "end":
                self.expect(";")
        return out

    def statement(self) -> list[Assignment]:
        t = self.token
        if t.text in STATEMENTS:
            raise self.source.unsupported(t.at, f"{t.text!r} is not supported: {STATEMENTS[t.text]}")
        if t.text in ("{", "}"):
            raise self.source.unsupported(t.at, "blocks are not supported: statements stand one after the other")
        self.no_pointer()
        constant = t.text == "const"
        self.k += constant
        found = self.type_here()
        if found is None and constant:
            raise self.unexpected("a type")
        if found is None:
            return [self.assignment()]
        self.k += found[1]
        return self.declaration(found[0])

    def declaration(self, type_: str) -> list[Assignment]:
        out = []
        while True:
            self.no_pointer()
            name = self.name()
            if name.text in self.readable or name.text in self.writable or name.text in ARITY:
                raise self.source.error(name.at, f"{name.text!r} is taken: choose another name")
            if self.accept("="):
                out.append(Assignment(name.at, name.text, type_, self.expression()))
                self.readable.add(name.text)
            elif not type_:
                raise self.unexpected("'=', which tells the type of an auto variable")
            self.writable[name.text] = type_
            if not self.accept(","):
                return out

    def name(self) -> Token:
        if self.token.kind != "name":
            raise self.unexpected("a name")
        return self.next()

    def assignment(self) -> Assignment:
        name = self.name()
        if name.text not in self.writable:
            if name.text in self.readable:
                raise self.source.error(name.at, f"{name.text!r} is an input, which cannot be assigned")
            self.resolve(name)
        sign = self.accept("=", "+=", "-=", "*=", "/=", "%=", "&=", "|=", "^=", "<<=", ">>=")
        if sign is None:
            raise self.unexpected("an assignment")
        if sign.text != "=":
            self.resolve(name)
        value = self.expression()
        if sign.text != "=":
            value = Operation(sign.at, sign.text[:-1], (Name(name.at, name.text), value))
        self.readable.add(name.text)
        return Assignment(name.at, name.text, self.writable[name.text], value)

    # --- expressions --------------------------------------------------------------------------------------------------

    def expression(self) -> Expression:
        condition = self.binary(0)
        sign = self.accept("?")
        if sign is None:
            return condition
        yes = self.expression()
        self.expect(":")
        return Operation(sign.at, "?:", (condition, yes, self.expression()))

    def binary(self, level: int) -> Expression:
        if level == len(LEVELS):
            return self.unary()
        left = self.binary(level + 1)
        while sign := self.accept(*LEVELS[level]):
            left = Operation(sign.at, sign.text, (left, self.binary(level + 1)))
        return left

    def unary(self) -> Expression:
        if sign := self.accept("-", "+", "!", "~"):
            return Operation(sign.at, sign.text, (self.unary(),))
        self.no_pointer()
        if self.token.text == "(":
            at = self.next().at
            found = self.type_here()
            if found is not None:
                self.k += found[1]
                self.no_pointer()
                self.expect(")")
                return self.cast(at, found[0], self.unary())
            inner = self.expression()
            self.expect(")")
            return inner
        return self.primary()

    def cast(self, at: int, type_: str, operand: Expression) -> Expression:
        if not type_:
            raise self.source.error(at, "auto is no type to convert to")
        return Cast(at, type_, operand)

    def primary(self) -> Expression:
        t = self.token
        if t.kind == "number":
            return self.number(self.next())
        if t.kind != "name":
            raise self.unexpected("a value")
        if t.text == "static_cast":
            self.next()
            self.expect("<")
        found = self.type_here()
        if found is not None:  # T(x) or static_cast<T>(x)
            self.k += found[1]
            if t.text == "static_cast":
                self.expect(">")
            self.expect("(")
            inner = self.expression()
            self.expect(")")
            return self.cast(t.at, found[0], inner)
        if t.text == "static_cast":
            raise self.unexpected("a type")
        self.next()
        return self.call(t) if self.token.text == "(" else self.value(t)

    def value(self, t: Token) -> Expression:
        if t.text in CONSTANTS and t.text not in self.readable:
            return Number(t.at, CONSTANTS[t.text], "")
        if t.text in ("true", "false"):
            return Number(t.at, t.text == "true", "bool")
        self.resolve(t)
        return Name(t.at, t.text)

    def resolve(self, t: Token) -> None:
        """ParseError, or UnsupportedError for what CuPy has, where a name has no value."""
        if t.text in self.readable:
            return
        if t.text in self.writable:
            raise self.source.error(t.at, f"{t.text!r} has no value yet: assign to it first")
        if t.text in ("i", "n", "blockIdx", "threadIdx", "blockDim") or t.text.startswith("_"):
            raise self.source.unsupported(
                t.at,
                f"{t.text!r} is not supported: a kernel does not know at which index it is, nor how many there are",
            )
        known = ", ".join(sorted(self.readable | set(self.writable))) or "none"
        raise self.source.error(t.at, f"there is no {t.text!r} here; there are {known}")

    def call(self, t: Token) -> Expression:
        single = t.text.endswith("f") and t.text not in ARITY and t.text[:-1] in ARITY  # expf: of float32 numbers
        name = t.text[:-1] if single else t.text
        if name not in ARITY:
            raise self.source.unsupported(
                t.at, f"there is no function {t.text!r}; there are {', '.join(sorted(ARITY))}"
            )
        self.expect("(")
        given = [] if self.token.text == ")" else [self.expression()]
        while given and self.accept(","):
            given.append(self.expression())
        self.expect(")")
        if len(given) != ARITY[name]:
            raise self.source.error(t.at, f"{t.text} expects {ARITY[name]} operands, got {len(given)}")
        return Operation(t.at, name, tuple(Cast(x.at, "float32", x) for x in given) if single else tuple(given))

    def number(self, t: Token) -> Number:
        body = t.text if t.text[:2] in ("0x", "0X") else t.text.rstrip("fF")
        body, suffix = body.rstrip("uUlL"), t.text[len(body.rstrip("uUlL")) :].lower()
        if "x" not in body.lower() and any(c in body for c in ".eE"):
            if suffix not in ("", "f"):
                raise self.source.error(t.at, f"{t.text!r} is no number: the suffix of a decimal number is f")
            return Number(t.at, float(body), "float32" if suffix else "")
        if suffix not in ("", "u", "l", "ll", "ul", "ull", "lu", "llu") or (
            len(body) > 1 and body[0] == "0" and body[1] not in "xX"
        ):
            raise self.source.error(
                t.at, f"{t.text!r} is no integer: write it in decimal or as 0x.., with u, l or ul behind"
            )
        value = int(body, 0)
        kind = "uint" if "u" in suffix else "int"
        bits = 64 if "l" in suffix or value >= 1 << (32 - (kind == "int")) else 32
        if value >= 1 << (bits - (kind == "int")):
            raise self.source.error(
                t.at, f"{t.text} does not fit into 64 bits" + ("" if kind == "uint" else "; unsigned ones end in u")
            )
        return Number(t.at, value, f"{kind}{bits}")


def parse_statements(
    source: Source, inputs: Collection[str], outputs: Mapping[str, str], variables: Collection[str]
) -> list[Assignment]:
    """Parse assignments to outputs and locals. ParseError: no list of assignments. UnsupportedError: other notation."""
    parser = Parser(source, set(inputs), dict(outputs), variables)
    made = parser.statements()
    missing = [name for name in outputs if name not in parser.readable]
    if missing:
        raise source.error(len(source.text.rstrip()), f"nothing is assigned to the output {missing[0]!r}")
    return made


def parse_expression(source: Source, names: Collection[str], variables: Collection[str]) -> Expression:
    """One expression; errors as above."""
    parser = Parser(source, set(names), {}, variables)
    made = parser.expression()
    if parser.token.kind != "end":
        raise parser.unexpected("the end" if parser.token.text != "=" else "one expression, which is no assignment")
    return made
