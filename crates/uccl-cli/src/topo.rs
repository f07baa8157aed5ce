//! x
#[derive(clap::Args)]
pub(crate) struct TopoArgs {}
pub(crate) fn run(_: &TopoArgs) -> anyhow::Result<()> {
    Ok(())
}
