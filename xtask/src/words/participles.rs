//! Types of Rust that are named by a participle (`Placed`, `Waiting`) in place of a noun.

/// Words before the keyword of a type's definition.
const MODIFIERS: [&str; 6] = ["pub", "crate", "super", "self", "in", "unsafe"];
/// The keywords of definitions.
const KEYWORDS: [&str; 5] = ["struct", "enum", "union", "trait", "type"];
/// Nouns that end as participles do.
const NOUNS: [&str; 18] = [
    "Anything",
    "Backing",
    "Finding",
    "Greeting",
    "Handling",
    "Happening",
    "Listing",
    "Mapping",
    "Meeting",
    "Need",
    "Ordering",
    "Ring",
    "Routing",
    "Setting",
    "Staging",
    "Tampering",
    "Threading",
    "Wording",
];
/// Participles that do not end in `ed` or `ing`.
const IRREGULAR: [&str; 34] = [
    "Begun", "Borne", "Bound", "Bought", "Broken", "Built", "Chosen", "Come", "Done", "Drawn",
    "Driven", "Found", "Frozen", "Given", "Gone", "Held", "Kept", "Known", "Lent", "Lost", "Made",
    "Meant", "Met", "Paid", "Said", "Seen", "Sent", "Shown", "Spent", "Taken", "Told", "Torn",
    "Woken", "Written",
];

/// Whether a line defines a type whose last word is a participle.
pub(super) fn names_a_type(line: &str) -> bool {
    if !line.trim_start().starts_with(|c: char| c.is_ascii_lowercase()) {
        return false;
    }
    let mut words = super::words(line).skip_while(|word| MODIFIERS.contains(word));
    let is_type = words.next().is_some_and(|word| KEYWORDS.contains(&word));
    is_type && words.next().is_some_and(|name| is_participle(last_word(name)))
}

/// The last word of a name in camel case.
fn last_word(name: &str) -> &str {
    name.rfind(char::is_uppercase).map_or(name, |at| &name[at..])
}

fn is_participle(word: &str) -> bool {
    let ends_so = word.ends_with("ed") || word.ends_with("ing");
    ends_so && !NOUNS.contains(&word) || IRREGULAR.contains(&word)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_participle_is_found_and_a_noun_is_not() {
        let found = [
            "struct Placed {",
            "pub(crate) enum Waiting<'a> {",
            "    pub(super) struct RowsTold = \"Name\" {",
            "type Kept = u32;",
            "pub unsafe trait CopyDone {",
        ];
        assert!(found.iter().all(|line| names_a_type(line)));
        let sound = [
            "struct Placement {",
            "pub struct PlacedRow;",
            "type RowMapping = u8;",
            "// struct Placed",
            "fn placed() {",
            "use super::Placed;",
            "let done = Done;",
        ];
        let wrong: Vec<_> = sound.iter().filter(|line| names_a_type(line)).collect();
        assert!(wrong.is_empty(), "{wrong:?}");
    }
}
