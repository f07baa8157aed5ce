//! The lane over all rails of a connection.

use uccl_device::MemoryKind;
use uccl_wire::rails::Note;

use super::{Aftermath, Lane, Moves};
use crate::mem::Span;

/// A lane over the rails that two endpoints have between them.
///
/// It carries no messages. Instead its two ends exchange notes: after each call the engine takes
/// the notes with [`take_note`](Self::take_note), sends them over a lane that carries messages, and
/// gives them to [`hear`](Self::hear) at the other end.
pub trait RailLane: Lane {
    /// Whether there are notes for the peer's end.
    fn has_notes(&self) -> bool;

    /// Takes the next note for the peer's end. Notes must arrive there in this order.
    fn take_note(&self) -> Option<Note>;

    /// Handles a note from the peer's end.
    ///
    /// # Errors
    /// Why the note is invalid: the peer is not to be trusted any more.
    fn hear(&self, note: &[u8]) -> Result<(), String>;

    /// The name of the link that its paths use.
    fn link(&self) -> &'static str;

    /// How many paths work.
    fn paths_up(&self) -> usize;

    /// Whether every path has been tried once, or half a second has passed since the first worked,
    /// or the peer reports that this is so at its end.
    fn is_settled(&self) -> bool;

    /// The paths, for people: our rail, and whether it works or why not. Until the peer has offered
    /// its rails, all of ours.
    fn describe(&self) -> Vec<(String, Result<(), String>)>;

    /// How data moves over it. Where our regions, or those of the peer's that it was asked about,
    /// move in several ways, this is the slowest of them.
    fn moves(&self) -> Moves;

    /// Whether a working path accepts this local memory, which is of this kind, or a copy of it.
    fn reaches(&self, local: &[Span], kind: MemoryKind) -> bool;

    /// Whether a device works on a request of ours: its end shows without a message from the peer.
    fn is_under_way(&self) -> bool;

    /// The accesses to our memory that may still happen after [`Lane::kill`]: by devices that did
    /// not end their channels in time. `None` if there are none.
    fn aftermath(&self) -> Option<Box<dyn Aftermath>>;
}
