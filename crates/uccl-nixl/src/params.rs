//! Backend parameters: the engine's settings under short names, `{"transport": "tcp"}` for
//! `UCCL_P2P_TRANSPORT=tcp`.

use uccl_p2p::Config;

use crate::status::Result;

/// Names that callers of other backends use for the number of workers.
const WORKERS: [&str; 2] = ["num_threads", "num_workers"];
/// Set by programs for the plugin of other builds of NIXL; ignored here.
const IGNORED: &str = "in_python";

/// The environment's settings, changed by these. An empty value leaves a setting as it is. The port
/// is any free one unless it is named: several agents share a host, and peers learn it from the
/// metadata.
pub(crate) fn config<'a>(params: impl Iterator<Item = (&'a str, &'a str)>) -> Result<Config> {
    let mut config = Config { port: Some(0), ..Config::from_env()? };
    for (name, value) in params.filter(|(_, value)| !value.is_empty()) {
        match name {
            IGNORED => {}
            name if WORKERS.contains(&name) => config.set("num_cpus", value)?,
            name => config.set(name, value)?,
        }
    }
    Ok(config)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use uccl_p2p::Transport;

    use super::*;

    #[test]
    fn settings_are_known_by_their_short_names() {
        let given =
            [("transport", "tcp"), ("timeout_ms", "250"), ("num_threads", "2"), ("bind", "")];
        let config = config(given.into_iter()).expect("all of them are known");
        assert_eq!(config.transport, Transport::Tcp);
        assert_eq!(config.timeout, Duration::from_millis(250));
        assert_eq!((config.num_cpus, config.port, config.bind), (2, Some(0), None));
    }

    #[test]
    fn a_parameter_that_is_not_understood_is_named() {
        for (name, value) in [("transprot", "tcp"), ("port", "70000"), ("timeout_ms", "soon")] {
            let refused = config([(name, value)].into_iter()).expect_err("refused").to_string();
            assert!(refused.to_lowercase().contains(name), "{refused}");
        }
    }

    #[test]
    fn every_name_that_is_offered_may_be_left_empty() {
        for name in Config::names() {
            config([(name.as_str(), "")].into_iter()).expect("an empty value changes nothing");
        }
    }
}
