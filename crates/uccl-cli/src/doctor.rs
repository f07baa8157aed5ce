//! x
use std::process::ExitCode;
#[derive(clap::Args)]
pub(crate) struct DoctorArgs {}
pub(crate) fn run(_: &DoctorArgs) -> anyhow::Result<ExitCode> {
    Ok(ExitCode::SUCCESS)
}
