"""Seeded requests for demonstrations, tests and traces: the same numbers for the same seed, on every machine.

`chats` has conversations over shared system prompts, which `kvpager demo` serves; `kinds` has the four shapes that
`kvpager generate` writes into trace files; `arrivals` says when each of their requests arrives. Every module documents
the distributions it draws from. All of it is made up: token values are uniform, and nothing looks at what they mean.
"""

from .arrivals import STEP_MS, Arrival, arrivals, token_requests
from .chats import Chat, ChatWorkload, Turn, chat_workload
from .kinds import KINDS, Agent, Burst, Chatting, Kind, VarFront

__all__ = [
    "KINDS",
    "STEP_MS",
    "Agent",
    "Arrival",
    "Burst",
    "Chat",
    "ChatWorkload",
    "Chatting",
    "Kind",
    "Turn",
    "VarFront",
    "arrivals",
    "chat_workload",
    "token_requests",
]
