"""Errors that several callers may be told of."""

from millstream.tokenizer_manager.api_error import bad_request


def test_a_renamed_error_leaves_the_other_callers_alone() -> None:
    error = bad_request("tools[0].function.parameters: no", "tools[0].function.parameters", "invalid_schema")
    renamed = error.renamed({".function.parameters": ".input_schema"})
    assert (renamed.param, renamed.message) == ("tools[0].input_schema", "tools[0].input_schema: no")
    assert (renamed.status, renamed.code) == (400, "invalid_schema")
    assert error.param == "tools[0].function.parameters"
    assert error.message.startswith("tools[0].function.parameters")
