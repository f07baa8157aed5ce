//! x
pub(crate) const SUBCOMMAND: &str = "probe-memory";
#[derive(clap::Args)]
pub(crate) struct ProbeArgs {}
pub(crate) fn serve_parent(_: &ProbeArgs) -> anyhow::Result<()> {
    Ok(())
}
