"""LAION's columns: the names under which its releases publish them, and the one name each has here."""

import pyarrow as pa
import pyarrow.compute as pc

from shards.base.errors import RequestError

SPELLINGS = {
    "URL": ("URL", "url"),
    "TEXT": ("TEXT", "text", "CAPTION", "caption"),
    "WIDTH": ("WIDTH", "width", "original_width"),
    "HEIGHT": ("HEIGHT", "height", "original_height"),
    "similarity": ("similarity", "SIMILARITY"),
    "hash": ("hash",),
    "punsafe": ("punsafe", "PUNSAFE"),
    "pwatermark": ("pwatermark", "PWATERMARK"),
    "AESTHETIC_SCORE": ("AESTHETIC_SCORE", "aesthetic", "aesthetic_score", "AESTHETIC"),
    "LANGUAGE": ("LANGUAGE", "language"),
    "source_key": ("key", "source_key"),  # img2dataset keeps the name `key` for its own
}


def find_columns(schema: pa.Schema, place: str) -> dict[str, str]:
    """Our name → the file's name, for each known column that `schema` has.

    Raises:
        RequestError: one column is there under two spellings, so that we cannot know which is meant.
    """
    found = {}
    for name, spellings in SPELLINGS.items():
        present = [spelling for spelling in spellings if spelling in schema.names]
        if len(present) > 1:
            raise RequestError(
                f"{place} has the columns {' and '.join(f'`{spelling}`' for spelling in present)}, which both mean "
                f"{name}. Keep one of them."
            )
        if present:
            found[name] = present[0]
    return found


# what select writes: one type for each column, whatever the releases have
OUTPUT_SCHEMA = pa.schema(
    [
        ("URL", pa.string()),
        ("TEXT", pa.string()),
        ("WIDTH", pa.int32()),
        ("HEIGHT", pa.int32()),
        ("similarity", pa.float32()),
        ("hash", pa.int64()),
        ("punsafe", pa.float32()),
        ("pwatermark", pa.float32()),
        ("AESTHETIC_SCORE", pa.float32()),
        ("LANGUAGE", pa.string()),
        ("source_key", pa.string()),
    ]
)


# URLs and captions hardly repeat, so parquet's dictionaries of them would only cost
DICTIONARY_COLUMNS = ["LANGUAGE"]


def check_types(schema: pa.Schema, found: dict[str, str], place: str) -> None:
    """Refuse a known column whose type cannot be what it means.

    Raises:
        RequestError: such a column, with its type and the one wanted.
    """
    for name, spelling in found.items():
        wanted, actual = OUTPUT_SCHEMA.field(name).type, schema.field(spelling).type
        actual = actual.value_type if pa.types.is_dictionary(actual) else actual
        is_text = pa.types.is_string(actual) or pa.types.is_large_string(actual)
        is_number = pa.types.is_integer(actual) or pa.types.is_floating(actual)
        fits = {
            "URL": is_text,
            "TEXT": is_text,
            "LANGUAGE": is_text,
            "hash": pa.types.is_integer(actual),
            "source_key": is_text or pa.types.is_integer(actual),
        }.get(name, is_number)
        if not fits and not pa.types.is_null(actual):
            raise RequestError(
                f"{place}: the column `{spelling}` is {actual}, and {name} is to be {wanted}. Mend or remove the file."
            )


def unify(batch: pa.RecordBatch | pa.Table) -> pa.Table:
    """Columns under our names → a table of OUTPUT_SCHEMA; columns that are not there are null.

    Raises:
        pa.ArrowInvalid: a number does not fit, such as a width of 10¹².
    """
    columns = []
    for field in OUTPUT_SCHEMA:
        if field.name not in batch.schema.names:
            columns.append(pa.nulls(batch.num_rows, field.type))
            continue
        column = batch.column(field.name)
        if pa.types.is_integer(field.type) and pa.types.is_floating(column.type):
            column = pc.if_else(pc.is_nan(column), None, column)  # pandas writes missing integers so
        # hashes of 64 bits wrap around where the release has them unsigned
        columns.append(column.cast(field.type, safe=field.name != "hash"))
    return pa.table(columns, schema=OUTPUT_SCHEMA)
