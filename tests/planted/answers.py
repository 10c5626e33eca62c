"""Bugs of what an answer means: calls of tools, thoughts, and the templates that tell of them."""

from tests.planted.plant import Plant

PARSING = "tests/unit/test_tools_parsing.py"
ANY_CUT = "tests/property/test_answer_parsing.py"
GRAMMAR = "tests/unit/test_tools_grammar.py"
SCENES = "tests/integration/test_tools_and_thoughts.py"
TEMPLATES = "tests/unit/test_chat_template.py"
XML = "tests/unit/test_tools_xml.py"

PLANTS = (
    Plant(
        name="xml-call-not-offered",
        rule="Only a function that was offered is called, in XML, too.",
        file="gateway/tools/function_xml.py",
        text="        self._at = _At.NOWHERE if self._function is None else _At.TAG\n",
        replacement="        self._at = _At.TAG\n",
        tests=(f"{XML}::test_what_is_no_call_comes_out_as_it_was_written",),
    ),
    Plant(
        name="xml-half-end-told",
        rule="What may be the end of a value is no part of it before the rest has come.",
        file="gateway/tools/function_xml.py",
        text="            num_kept = max(num_begun(pending, tag) for tag in _VALUE_ENDS)\n",
        replacement="            num_kept = num_begun(pending, _END_OF_PARAMETER)\n",
        tests=(f"{XML}::test_calls",),
    ),
    Plant(
        name="call-not-offered",
        rule="Only a function that was offered is called.",
        file="gateway/tools/call_reader.py",
        text="        if name in self._names:\n",
        replacement="        if name is not None:\n",
        tests=(PARSING, ANY_CUT),
    ),
    Plant(
        name="half-marker-shown",
        rule="What may still become a marker is not shown.",
        file="gateway/markers.py",
        text="    return _without_space(text[: len(text) - num_begun(text, marker)]), None\n",
        replacement="    return _without_space(text), None\n",
        tests=(PARSING, "tests/unit/test_reasoning.py", ANY_CUT),
    ),
    Plant(
        name="attempt-forgotten",
        rule="Text that looked like a call is content, and so is what follows it.",
        file="gateway/tools/call_parser.py",
        text="        self._text = self._attempt[told:] + self._text\n",
        replacement="",
        tests=(PARSING, ANY_CUT),
    ),
    Plant(
        name="doubt-without-end",
        rule="The beginning of a call is read again at most so far as its function may be unknown.",
        file="gateway/tools/call_parser.py",
        text=" or len(self._attempt) >= MAX_DOUBT:\n",
        replacement=":\n",
        tests=(f"{PARSING}::test_a_call_whose_function_comes_too_late_is_content",),
    ),
    Plant(
        name="markers-hidden",
        rule="Special tokens that mark calls and thoughts are seen by the parser.",
        file="gateway/answer.py",
        text=", shown=parser.markers)",
        replacement=")",
        tests=(f"{SCENES}::test_a_call", f"{SCENES}::test_thoughts"),
    ),
    Plant(
        name="thoughts-forbidden",
        rule="A grammar lets a model that thinks do so first.",
        file="gateway/chat_grammar.py",
        text="        if ahead is not None:\n",
        replacement="        if ahead is not None and ahead.is_open is None:\n",
        tests=(f"{SCENES}::test_thoughts_before_json", f"{SCENES}::test_thoughts_before_a_call"),
    ),
    Plant(
        name="schema-loosens-grammar",
        rule="A schema of a client does not set how strictly it is followed.",
        file="gateway/tools/grammar.py",
        text='{**schema, "x-guidance": _OPTIONS}',
        replacement='{"x-guidance": _OPTIONS, **schema}',
        tests=(f"{GRAMMAR}::test_no_schema_loosens_its_own_rules",),
    ),
    Plant(
        name="tools-unknown-to-template",
        rule="Tools that the model is not told of are refused, not ignored.",
        file="gateway/chat_template.py",
        text="        self._check_tools(tools)\n",
        replacement="",
        tests=(TEMPLATES, f"{SCENES}::test_a_model_that_knows_no_tools_says_so"),
    ),
    Plant(
        name="template-variable-ignored",
        rule="What a request tells a template that does not listen is refused.",
        file="gateway/chat_template.py",
        text="        self._check_kwargs(kwargs)\n",
        replacement="",
        tests=(TEMPLATES, f"{SCENES}::test_effort_reaches_the_template_or_is_refused"),
    ),
    Plant(
        name="namespace-with-names-of-python",
        rule="A template's namespaces hold no names that mean something to Python.",
        file="gateway/template_sandbox.py",
        text='    if name.startswith("_"):\n',
        replacement="    if not name:\n",
        tests=(TEMPLATES,),
    ),
)
