"""Facts put into passages, and questions about them: what the compressors learn to answer from.

A fact is a sentence of ours, of made-up names, numbers and codes, between two sentences of a manual. Nothing but the
passage tells the answer.
"""

from __future__ import annotations

import numpy as np

from gistkit_lab.presses.facts import MONTHS, Fact

NAMES = (
    "Ada", "Adam", "Alice", "Amir", "Anna", "Ben", "Carla", "Chen", "Clara", "Dana", "David", "Elena", "Emil", "Eva",
    "Felix", "Fatima", "Greta", "Hugo", "Ida", "Ines", "Ivan", "Jana", "Jonas", "Julia", "Karim", "Kira", "Lars",
    "Lena", "Leo", "Lucia", "Mara", "Marco", "Maria", "Mina", "Nadia", "Nils", "Nora", "Olga", "Oscar", "Paul",
    "Petra", "Rosa", "Samir", "Sara", "Simon", "Sofia", "Tariq", "Tom", "Vera", "Viktor", "Yuki", "Zoe",
)  # fmt: skip
SURNAMES = (
    "Abel", "Bauer", "Bell", "Bianchi", "Carter", "Castro", "Dietz", "Dubois", "Egan", "Fischer", "Flores", "Frank",
    "Garcia", "Grant", "Hahn", "Hayes", "Ito", "Jansen", "Kaya", "Keller", "Klein", "Kovac", "Lang", "Larsen",
    "Lopez", "Marsh", "Meyer", "Moreau", "Nash", "Nowak", "Okoye", "Olsen", "Park", "Perez", "Petrov", "Quinn",
    "Rossi", "Sato", "Schmidt", "Silva", "Singh", "Stone", "Tanaka", "Torres", "Ueda", "Vogel", "Walsh", "Weber",
    "Wolf", "Young", "Zhang",
)  # fmt: skip
CITIES = (
    "Oslo", "Lisbon", "Vienna", "Dublin", "Prague", "Geneva", "Athens", "Madrid", "Warsaw", "Helsinki", "Nairobi",
    "Lima", "Cairo", "Osaka", "Quito", "Hanoi", "Porto", "Turin", "Leeds", "Bergen", "Zagreb", "Riga", "Tunis",
    "Accra",
)  # fmt: skip
PLACES = (
    "archive", "backup server", "library", "printer", "workshop", "north gate", "laboratory", "warehouse",
    "main office", "test bench", "mail room", "reading room", "data center", "garage", "meeting room", "old mill",
    "harbor office", "greenhouse", "storage room", "studio", "canteen",
)  # fmt: skip
PROJECTS = (
    "survey", "bridge project", "summer course", "winter course", "pilot study", "annual report", "safety review",
    "network upgrade", "new catalog", "field trip", "spring festival", "training program", "archive move", "audit",
)  # fmt: skip
COLOURS = ["red", "blue", "green", "yellow", "black", "white", "orange", "purple", "brown", "grey", "silver", "pink"]


def draw_fact(random: np.random.Generator) -> Fact:
    """A fact of one of several forms."""
    pick = lambda values: str(values[int(random.integers(len(values)))])  # noqa: E731
    place, project = pick(PLACES), pick(PROJECTS)
    person, city = f"{pick(NAMES)} {pick(SURNAMES)}", pick(CITIES)
    number, few = str(int(random.integers(100, 10000))), str(int(random.integers(2, 100)))
    letters = "".join(chr(65 + int(letter)) for letter in random.integers(26, size=2))
    code = f"{letters}-{int(random.integers(100, 1000))}"
    date = f"{int(random.integers(1, 29))} {pick(MONTHS)}"
    colour = pick(COLOURS)
    forms = (
        Fact(f"The access code of the {place} is {number}.", f"What is the access code of the {place}?", number),
        Fact(f"The serial number of the {place} is {code}.", f"What is the serial number of the {place}?", code),
        Fact(f"{person} is in charge of the {project}.", f"Who is in charge of the {project}?", person),
        Fact(f"The {project} was started by {person}.", f"Who started the {project}?", person),
        Fact(f"The {project} takes place in {city}.", f"Where does the {project} take place?", city),
        Fact(f"The {project} ends on {date}.", f"When does the {project} end?", date),
        Fact(f"There are {few} chairs in the {place}.", f"How many chairs are in the {place}?", few),
        Fact(f"The budget of the {project} is {number} dollars.", f"What is the budget of the {project}?",
             f"{number} dollars"),
        Fact(f"The door of the {place} is {colour}.", f"What color is the door of the {place}?", colour),
        Fact(f"The key of the {place} is kept by {person}.", f"Who keeps the key of the {place}?", person),
    )  # fmt: skip
    return forms[int(random.integers(len(forms)))]


# What is asked and not answered, as in `gistkit_lab.presses.facts`.
ABSENT = "not in the text"
KINDS = ("dates", "numbers", "names", "codes", "yes or no", ABSENT)


def draw_facts(count: int, random: np.random.Generator, held_out: bool = False) -> dict[str, list[Fact]]:
    """Facts of several kinds by kind, each about another thing; one in eight is not in the text, without a sentence.

    With `held_out` they are of each fifth of the names, places and projects, rather than of the others.
    """
    own = lambda values: [value for index, value in enumerate(values) if (index % 5 == 0) == held_out]  # noqa: E731
    pick = lambda values: str(values[int(random.integers(len(values)))])  # noqa: E731
    names, surnames, cities = own(NAMES), own(SURNAMES), own(CITIES)
    things = own((*PLACES, *PROJECTS))
    found: dict[str, list[Fact]] = {}
    for index in random.permutation(len(things))[:count]:
        it = things[index]
        person, other = (f"{pick(names)} {pick(surnames)}" for _ in range(2))
        date = f"{int(random.integers(1, 29))} {pick(MONTHS)}"
        dated = f"{date} {int(random.integers(1950, 2030))}"
        number, few = str(int(random.integers(100, 10000))), str(int(random.integers(2, 1000)))
        code = f"{''.join(chr(65 + int(letter)) for letter in random.integers(26, size=2))}-{few}"
        so = bool(random.integers(2))
        answer, negation, none = ("yes", "", "an") if so else ("no", " not", "no")
        forms = {
            "dates": [
                Fact(f"The {it} was finished on {dated}.", f"When was the {it} finished?", dated),
                Fact(f"The contract for the {it} runs until {dated}.",
                     f"Until when does the contract for the {it} run?", dated),
                Fact(f"{person} will visit the {it} on {date}.", f"On which day will {person} visit the {it}?", date),
            ],
            "numbers": [
                Fact(f"There are {few} people on the list of the {it}.",
                     f"How many people are on the list of the {it}?", few),
                Fact(f"The {it} costs {number} euros a year.", f"How many euros does the {it} cost a year?", number),
                Fact(f"The {it} uses {few} liters of paint.", f"How many liters of paint does the {it} use?", few),
            ],
            "names": [
                Fact(f"{person} is in charge of the {it}.", f"Who is in charge of the {it}?", person),
                Fact(f"The {it} was started by {person}, not by {other}.", f"Who started the {it}?", person),
                Fact(f"The {it} is named after {person}.", f"After whom is the {it} named?", person),
                Fact(f"Letters about the {it} go to {pick(cities)}.", f"Where do letters about the {it} go?", ""),
            ],
            "codes": [
                Fact(f"The serial number of the {it} is {code}.", f"What is the serial number of the {it}?", code),
                Fact(f"The folder of the {it} is {pick(COLOURS)}.", f"What color is the folder of the {it}?", ""),
            ],
            "yes or no": [
                Fact(f"The {it} was{negation} approved.", f"Was the {it} approved?", answer),
                Fact(f"The {it} has {none} insurance.", f"Does the {it} have an insurance?", answer),
                Fact(f"{person} may{negation} change the {it}.", f"May {person} change the {it}?", answer),
            ],
        }  # fmt: skip
        absent = random.integers(8) == 0
        kind = pick(KINDS[:-1])
        fact = forms[kind][int(random.integers(len(forms[kind])))]
        if not fact.answer:
            # The last word of the sentence.
            fact = fact._replace(answer=fact.sentence.rpartition(" ")[2].rstrip("."))
        found.setdefault(ABSENT if absent else kind, []).append(Fact("", fact.question, ABSENT) if absent else fact)
    return found


def plant(passage: list[int], sentence: list[int], ends: set[int], random: np.random.Generator) -> list[int]:
    """Token ids of a passage with a sentence in it, behind one of its sentences, which `ends` end, if there is one."""
    places = [index + 1 for index, token in enumerate(passage) if token in ends] or [0, len(passage)]
    at = places[int(random.integers(len(places)))]
    return [*passage[:at], *sentence, *passage[at:]]
