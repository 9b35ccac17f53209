"""The kinds of word problem and their wording: data, no code.

A template holds ways to ask, the plan as one or two steps, and the range each number is drawn from. In the texts {A} {B} {C}
are people, {he} {him} {He} are A's pronouns, {things} is an object, {box} {boxes} a container, {a} {b} {c} the given numbers. A
step is (sentence, left, operation, right); {calc} in its sentence becomes `12 + 7 = 19`. `r` is the first step's result, and
the last step's result is the answer.
"""

from __future__ import annotations

from dataclasses import dataclass

PEOPLE = (
    ("Mia", "she", "her"), ("Ben", "he", "him"), ("Ana", "she", "her"), ("Leo", "he", "him"),
    ("Zoe", "she", "her"), ("Sam", "he", "him"), ("Eva", "she", "her"), ("Tom", "he", "him"),
    ("Ivy", "she", "her"), ("Max", "he", "him"), ("Lucy", "she", "her"), ("Omar", "he", "him"),
    ("Nina", "she", "her"), ("Hugo", "he", "him"), ("Rosa", "she", "her"), ("Paul", "he", "him"),
)  # fmt: skip
THINGS = (
    "apples",
    "shells",
    "stickers",
    "marbles",
    "pencils",
    "cookies",
    "stamps",
    "beads",
    "cards",
    "books",
    "plums",
    "coins",
)
BOXES = (("bag", "bags"), ("box", "boxes"), ("jar", "jars"), ("pack", "packs"), ("basket", "baskets"))

Step = tuple[str, str, str, str]  # sentence with {calc}, left, operation, right


@dataclass(frozen=True)
class Template:
    name: str
    questions: tuple[str, ...]
    steps: tuple[Step, ...]
    ranges: tuple[tuple[int, int], ...]  # inclusive; of a, b, c in turn
    constants: tuple[int, ...] = ()  # operands a step may name as `2`


TEMPLATES = (
    Template(
        "gain",
        (
            "{A} has {a} {things}. {B} gives {him} {b} more. How many {things} does {A} have now?",
            "{A} found {a} {things} on Monday and {b} more on Tuesday. How many {things} does {he} have in all?",
            "There are {a} {things} in the {box}. {A} puts in {b} more. How many {things} are there now?",
        ),
        (("Now there are {calc} {things}.", "a", "+", "b"),),
        ((2, 50), (2, 49)),
    ),
    Template(
        "lose",
        (
            "{A} has {a} {things}. {He} gives {b} of them to {B}. How many {things} does {A} have left?",
            "{A} had {a} {things} but lost {b} on the way home. How many {things} are left?",
            "There are {a} {things} in the {box}. {A} takes out {b}. How many {things} are left?",
        ),
        (("There are {calc} {things} left.", "a", "-", "b"),),
        ((5, 60), (2, 50)),
    ),
    Template(
        "groups",
        (
            "{A} buys {a} {boxes} of {things}. Each {box} holds {b} {things}. How many {things} does {A} buy?",
            "{A} fills {a} {boxes} with {b} {things} each. How many {things} does {he} use?",
            "There are {a} {boxes} on the table with {b} {things} in each. How many {things} are there in all?",
        ),
        (("The {boxes} hold {calc} {things}.", "a", "*", "b"),),
        ((2, 12), (2, 9)),
    ),
    Template(
        "gain, lose",
        (
            "{A} has {a} {things}. {B} gives {him} {b} more, and then {A} loses {c}. How many {things} does {A} have now?",
            "{A} found {a} {things} on Monday and {b} on Tuesday. {He} gave {c} of them to {B}. How many {things} are left?",
            "There are {a} {things} in the {box}. {A} puts in {b}, and {B} takes out {c}. How many {things} are there now?",
        ),
        (("First there are {calc} {things}.", "a", "+", "b"), ("Then there are {calc} {things}.", "r", "-", "c")),
        ((2, 50), (2, 40), (2, 50)),
    ),
    Template(
        "lose, gain",
        (
            "{A} has {a} {things}. {He} gives {b} of them to {B} and then finds {c} more. How many {things} does {A} have now?",
            "{A} had {a} {things} but lost {b} on the way home. {B} gave {him} {c}. How many {things} does {he} have now?",
            "There are {a} {things} in the {box}. {A} takes out {b}, and {B} puts in {c}. How many {things} are there now?",
        ),
        (("First there are {calc} {things}.", "a", "-", "b"), ("Then there are {calc} {things}.", "r", "+", "c")),
        ((10, 40), (2, 30), (2, 29)),
    ),
    Template(
        "three",
        (
            "{A} has {a} {things}, {B} has {b} and {C} has {c}. How many {things} do they have in all?",
            "{A} found {a} {things} on Monday, {b} on Tuesday and {c} on Friday. How many {things} does {he} have in all?",
            "{A} puts {a} {things} in the {box}, {B} puts in {b} and {C} puts in {c}. How many {things} are there now?",
        ),
        (("First there are {calc} {things}.", "a", "+", "b"), ("In all there are {calc} {things}.", "r", "+", "c")),
        ((2, 35), (2, 35), (2, 29)),
    ),
    Template(
        "groups and more",
        (
            "{A} buys {a} {boxes} with {b} {things} each. {B} gives {him} {c} more. How many {things} does {A} have now?",
            "{A} has {a} {boxes} with {b} {things} each, and {c} more {things}. How many {things} does {he} have in all?",
            "There are {a} {boxes} with {b} {things} in each, and {A} finds {c} more. How many {things} are there in all?",
        ),
        (("The {boxes} hold {calc} {things}.", "a", "*", "b"), ("In all there are {calc} {things}.", "r", "+", "c")),
        ((2, 9), (2, 9), (2, 40)),
    ),
    Template(
        "groups but fewer",
        (
            "{A} buys {a} {boxes} with {b} {things} each. {He} gives {c} of them to {B}. How many {things} are left?",
            "{A} fills {a} {boxes} with {b} {things} each and then loses {c}. How many {things} are left?",
            "There are {a} {boxes} on the table with {b} {things} in each. {A} takes {c} of them. How many {things} are left?",
        ),
        (("The {boxes} hold {calc} {things}.", "a", "*", "b"), ("There are {calc} {things} left.", "r", "-", "c")),
        ((2, 12), (2, 9), (2, 50)),
    ),
    Template(
        "more than",
        (
            "{A} has {a} {things}. {B} has {b} more than {A}. How many {things} do they have together?",
            "{A} found {a} {things} on Monday. {B} found {b} more than {A}. How many {things} did they find together?",
        ),
        (("{B} has {calc} {things}.", "a", "+", "b"), ("Together they have {calc} {things}.", "a", "+", "r")),
        ((2, 40), (2, 30)),
    ),
    Template(
        "fewer than",
        (
            "{A} has {a} {things}. {B} has {b} fewer than {A}. How many {things} do they have together?",
            "{A} found {a} {things} on Monday. {B} found {b} fewer than {A}. How many {things} did they find together?",
        ),
        (("{B} has {calc} {things}.", "a", "-", "b"), ("Together they have {calc} {things}.", "a", "+", "r")),
        ((4, 35), (2, 29)),
    ),
    Template(
        "times as many",
        (
            "{A} has {a} {things}. {B} has {b} times as many as {A}. How many {things} do they have together?",
            "{A} found {a} {things} on Monday. {B} found {b} times as many as {A}. How many {things} did they find together?",
        ),
        (("{B} has {calc} {things}.", "a", "*", "b"), ("Together they have {calc} {things}.", "a", "+", "r")),
        ((2, 12), (2, 8)),
    ),
    Template(
        "half, then fewer",
        (
            "{A} has {a} {things}. {He} sells half of them and gives {b} to {B}. How many {things} are left?",
            "There are {a} {things} in the {box}. {A} takes out half of them and {B} takes {b}. How many {things} are left?",
        ),
        (("First there are {calc} {things}.", "a", "/", "2"), ("Then there are {calc} {things}.", "r", "-", "b")),
        ((6, 90), (2, 40)),
        (2,),
    ),
    Template(
        "spend",
        (
            "{A} has {a} dollars. {He} buys {b} {things} for {c} dollars each. How many dollars does {A} have left?",
            "{A} had {a} dollars and bought {b} {things} that cost {c} dollars each. How many dollars are left?",
        ),
        (("The {things} cost {calc} dollars.", "b", "*", "c"), ("There are {calc} dollars left.", "a", "-", "r")),
        ((10, 95), (2, 9), (2, 9)),
    ),
)
