"""Readers of data sets as they are published: one record at a time, from plain, gzip or zstd files."""

from gistkit.formats.files import members, records
from gistkit.formats.questions import Asked
from gistkit.formats.sets import QuestionSet, question_sets, read_questions

__all__ = ["Asked", "QuestionSet", "members", "question_sets", "read_questions", "records"]
