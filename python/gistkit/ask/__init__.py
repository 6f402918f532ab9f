"""Talking with a memory: conversations, what their answers attended to, and the text around questions."""

from gistkit.ask.conversation import Conversation
from gistkit.ask.pipeline import GistTextGeneration, register_pipeline
from gistkit.ask.sources import Passage, best_passages, context_attention, sources
from gistkit.ask.turns import Turns, chat_turns

__all__ = [
    "Conversation",
    "GistTextGeneration",
    "Passage",
    "Turns",
    "best_passages",
    "chat_turns",
    "context_attention",
    "register_pipeline",
    "sources",
]
