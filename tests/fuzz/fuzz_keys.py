"""The header: what is one key, and what is none, told without the code that it judges."""

from django.test import RequestFactory
from hypothesis import given
from hypothesis import strategies as st

from idempotency._http.key_header import key_of
from idempotency._http.problems import Problem
from tests.fuzz.examples import examples

_factory = RequestFactory()
VISIBLE = "".join(map(chr, range(0x21, 0x7F)))
KEYS = st.text(VISIBLE + " ", min_size=1, max_size=255)
PARAMETERS = st.sampled_from(
    ["", ";a", "; a=1", ';a="b;\\"c"', " ; x=?1;y=:YQ==:", ";a=1.5;b=token/x"]
)
#: What is near a key: most of these headers are broken in one place.
HEADERS = st.text(VISIBLE + " \t\x00\x1fé\U0001f600", max_size=12) | st.text(
    'ab\\";, =', max_size=10
).map(lambda text: f'"{text}')


def key_in(header: str) -> str | None:
    """Return the key that the code finds; None for a refusal, which must be 400."""
    request = _factory.post("/", headers={"Idempotency-Key": header})
    try:
        found = key_of(request, request, None)
    except Problem as refusal:
        if (refusal.status, refusal.code) != (400, "key_invalid"):
            raise
        return None
    return None if found is None else found.value


def read_by_hand(header: str) -> tuple[str | None, str]:
    """Return the key, read one character after the other as RFC 9651 reads a string, and what
    follows it."""
    header = header.strip(" \t")
    if not header.startswith('"'):
        bare = bool(header) and all(
            character in VISIBLE and character not in '",' for character in header
        )
        return (header if bare else None), ""
    key, rest = "", iter(header[1:])
    for character in rest:
        if character == '"':
            return key or None, "".join(rest).lstrip(" ")
        if character == "\\":
            character = next(rest, "")
            if character not in ('"', "\\"):
                break
        if not character or character not in VISIBLE + " ":
            break
        key += character
    return None, ""


@given(key=KEYS, parameters=PARAMETERS)
@examples(2500)
def test_a_key_is_the_same_in_quotes_and_without(key: str, parameters: str) -> None:
    escaped = key.replace("\\", "\\\\").replace('"', '\\"')

    assert key_in(f'"{escaped}"{parameters}') == key
    if not set(key) & set('", '):
        assert key_in(key) == key


@given(header=HEADERS)
@examples(2500)
def test_a_header_is_read_as_the_specification_reads_it(header: str) -> None:
    found, (key, rest) = key_in(header), read_by_hand(header)

    if rest.startswith(";"):
        assert found in (key, None)  # whether these are parameters is a grammar of its own
    else:
        assert found == (None if rest else key)
