//! Selecting devices by name, as NCCL and UCCL do.

use std::str::FromStr;

/// A selection of devices or interfaces. `mlx5,eth1` selects the names that begin so, `=eth0`
/// exactly that name, and `^` in front selects all others; `mlx5_0:1` is one port of a device.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Selection {
    text: String,
    others: bool,
    exact: bool,
    names: Vec<(String, Option<u8>)>,
}

impl Selection {
    /// Whether a device, or a port of it, is selected.
    #[must_use]
    pub fn takes(&self, name: &str, port: Option<u8>) -> bool {
        let named = self.names.iter().any(|(wanted, wanted_port)| {
            let same = if self.exact { name == wanted } else { name.starts_with(wanted.as_str()) };
            same && (wanted_port.is_none() || port.is_none() || *wanted_port == port)
        });
        named != self.others
    }
}

impl std::fmt::Display for Selection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text)
    }
}

impl FromStr for Selection {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (others, rest) = text.strip_prefix('^').map_or((false, text), |rest| (true, rest));
        let (exact, rest) = rest.strip_prefix('=').map_or((false, rest), |rest| (true, rest));
        let parts = rest.split(',').map(str::trim).filter(|name| !name.is_empty());
        let names: Vec<_> = parts.map(one).collect::<Result<_, _>>()?;
        if names.is_empty() {
            return Err("it names nothing".into());
        }
        Ok(Self { text: text.to_owned(), others, exact, names })
    }
}

fn one(text: &str) -> Result<(String, Option<u8>), String> {
    match text.split_once(':') {
        None => Ok((text.to_owned(), None)),
        Some((name, port)) => match port.parse() {
            Ok(port) if port > 0 => Ok((name.to_owned(), Some(port))),
            _ => Err(format!("{text:?}: after the colon belongs a port, from 1")),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn taken(selection: &str) -> Vec<&'static str> {
        let selection: Selection = selection.parse().expect("understood");
        let all = [("mlx5_0", 1), ("mlx5_0", 2), ("mlx5_1", 1), ("mlx5_10", 1), ("bnxt_re0", 1)];
        let shown = ["0:1", "0:2", "1:1", "10:1", "re0:1"];
        let both = all.into_iter().zip(shown);
        both.filter(|((name, port), _)| selection.takes(name, Some(*port)))
            .map(|(_, s)| s)
            .collect()
    }

    #[test]
    fn names_are_beginnings_unless_they_are_exact_and_others_may_be_meant() {
        assert_eq!(taken("mlx5"), ["0:1", "0:2", "1:1", "10:1"]);
        assert_eq!(taken("mlx5_1"), ["1:1", "10:1"]);
        assert_eq!(taken("=mlx5_1"), ["1:1"]);
        assert_eq!(taken("^mlx5"), ["re0:1"]);
        assert_eq!(taken("^=mlx5_1,bnxt_re0"), ["0:1", "0:2", "10:1"]);
        assert_eq!(taken("mlx5_0:2, bnxt"), ["0:2", "re0:1"]);
        assert_eq!(taken("^mlx5_0:2"), ["0:1", "1:1", "10:1", "re0:1"]);
        assert!(taken("hfi").is_empty());
    }

    #[test]
    fn a_text_that_is_no_selection_is_refused() {
        for text in ["", "^", "^=", ",", "mlx5_0:", "mlx5_0:0", "mlx5_0:x", "a:300"] {
            assert!(text.parse::<Selection>().is_err(), "{text}");
        }
    }
}
