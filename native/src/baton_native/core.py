"""The transfer agent's state machine, to be stepped by an agent in memory or a test: see native/transfer/core.h."""

from typing import TypeAlias

from baton_native._core import (
    AcceptBackend,
    Accepted,
    BackendAccepted,
    BackendChecked,
    BackendOffered,
    CancelPull,
    CheckBackend,
    Close,
    Closed,
    CompleteLease,
    Connect,
    Connected,
    Convert,
    Converted,
    Core,
    Credit,
    DataArrived,
    Discard,
    ExtendLease,
    Faults,
    FrameArrived,
    Granted,
    OfferBackend,
    OpenLease,
    Options,
    Place,
    Placed,
    PlacingStopped,
    PostReady,
    ReleaseLease,
    Report,
    RevokeLease,
    Send,
    Serve,
    Served,
    SetFaults,
    Shutdown,
    Stage,
    StartPull,
    Stats,
    StopPlacing,
    StopServing,
    UseBackend,
)

Event: TypeAlias = (
    OpenLease
    | ExtendLease
    | PostReady
    | CompleteLease
    | RevokeLease
    | StartPull
    | CancelPull
    | ReleaseLease
    | SetFaults
    | Shutdown
    | Accepted
    | Connected
    | Closed
    | FrameArrived
    | DataArrived
    | Served
    | Granted
    | Placed
    | Converted
    | PlacingStopped
    | BackendOffered
    | BackendAccepted
    | BackendChecked
)
Action: TypeAlias = (
    Connect
    | Close
    | Send
    | Serve
    | StopServing
    | Credit
    | Stage
    | Place
    | Convert
    | Discard
    | StopPlacing
    | OfferBackend
    | AcceptBackend
    | CheckBackend
    | UseBackend
    | Report
)

__all__ = [
    "AcceptBackend",
    "Accepted",
    "Action",
    "BackendAccepted",
    "BackendChecked",
    "BackendOffered",
    "CancelPull",
    "CheckBackend",
    "Close",
    "Closed",
    "CompleteLease",
    "Connect",
    "Connected",
    "Convert",
    "Converted",
    "Core",
    "Credit",
    "DataArrived",
    "Discard",
    "Event",
    "ExtendLease",
    "Faults",
    "FrameArrived",
    "Granted",
    "OfferBackend",
    "OpenLease",
    "Options",
    "Place",
    "Placed",
    "PlacingStopped",
    "PostReady",
    "ReleaseLease",
    "Report",
    "RevokeLease",
    "Send",
    "Serve",
    "Served",
    "SetFaults",
    "Shutdown",
    "Stage",
    "StartPull",
    "Stats",
    "StopPlacing",
    "StopServing",
    "UseBackend",
]
