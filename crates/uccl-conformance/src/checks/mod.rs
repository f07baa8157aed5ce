//! The checks, by subject.

mod endings;
mod messages;
mod refusals;
mod signals;
mod sleep;
mod transfers;

use crate::Check;

pub(crate) const ALL: [Check; 21] = [
    ("a write is there when it has ended, and reads give it back", transfers::any_length),
    ("pieces of a vector go where they belong", transfers::vectors),
    ("many operations at a time end once each, and leave nothing", transfers::many_at_a_time),
    ("mapped memory moves like any other", transfers::shared_memory),
    ("an access without the right is refused and changes nothing", refusals::without_the_right),
    ("a forged key and a range outside are refused", refusals::forged_or_outside),
    ("a region that was taken back keeps its bytes", refusals::taken_back),
    ("a region can be taken back while it is written", refusals::taken_back_during_a_write),
    ("nothing of a cancelled write lands later", endings::cancelled),
    ("a cancel of what has ended does nothing", endings::cancelled_too_late),
    ("a killed lane tells every operation, and lets go of memory", endings::killed),
    ("a peer that says goodbye is noticed", endings::peer_says_goodbye),
    ("a peer that is killed is noticed", endings::peer_is_killed),
    ("messages come whole and in order, after the data that they follow", messages::in_order),
    ("a ping is answered", messages::ping),
    ("a word changes when its bytes are there, by right only", signals::by_the_writer),
    ("a signal comes with its write, once, when the bytes are there", signals::with_a_write),
    (
        "a write that is refused does not signal, and one that may not signal fails",
        signals::refused,
    ),
    ("a write that is cancelled signals if it ends well, and only then", signals::cancelled),
    ("a word that was taken back keeps its value", signals::taken_back),
    ("who sleeps is woken", sleep::woken),
];
