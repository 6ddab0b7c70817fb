"""What a model wrote, told apart: its reasoning, its content, and its calls of functions.

In: an answer's text as it arrives, and the functions that a client offers. Out: Pieces. They depend
on the text alone, not on how it was cut into deltas, and none is taken back; the markers of a
family are in none of them. What is malformed becomes content.

    source       the text that is not read yet; a parser waits here for more of it
    parser       Piece, Reader, and what a parser is: ToolParser, ReasoningParser, CallForm
    json_calls   calls that are JSON objects, with a name and arguments; most families have them
    generic_json the answer is such an object, or a list of them: where no family's form is known
    xml_values   arguments that are written one by one as plain text, and become JSON by schema
    reasoning    the families that think between two markers; how many tokens reasoning takes
    registry     all parsers by name, and which one a chat template asks for

Each other module is a family's tool parser. To add one, write its module and its line of
`registry.TOOL_PARSERS`.
"""
