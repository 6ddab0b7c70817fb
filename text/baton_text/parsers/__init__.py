"""Split a model's answer into reasoning, content and function calls.

In: the answer's text as it arrives, and the functions that the client offers. Out: Pieces. The
pieces depend only on the text, not on how it was split into deltas, and are never retracted. They
contain none of the family's markers. Malformed calls become content.

    source       the unread text; a parser waits here for more
    parser       Piece, Reader and the kinds of parser: ToolParser, ReasoningParser, CallForm
    json_calls   calls that are JSON objects with a name and arguments; most families use them
    generic_json the whole answer is one such object or a list of them, for unknown families
    xml_values   arguments written one by one as plain text, converted to JSON by their schema
    reasoning    reasoning between two markers; counts reasoning tokens
    registry     all parsers by name; picks the parser that fits a chat template

Each other module is one family's tool parser. To add a family, write its module and add it to
`registry.TOOL_PARSERS`.
"""
