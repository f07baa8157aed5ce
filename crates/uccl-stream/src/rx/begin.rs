//! Begins a frame, once its header and descriptors are known.

use uccl_fabric::{
    lane::{LaneError, OpError, OpKind, OpName},
    mem::Access,
    pieces::Stretch,
    pipe::PipeRx,
    region::AccessError,
    status_of,
};
use uccl_wire::frame::{Header, Kind, Status};

use super::{IncomingWrite, Rx, RxContext, State, device::Targets, unexpected};
use crate::{
    ops::SendProgress,
    queue::Reply,
    upload::{End, Purpose},
};

impl<P: PipeRx> Rx<P> {
    /// Begins a frame. Its descriptors are known only if they are `sound`. False: earlier data must
    /// land first.
    pub(super) fn begin(&mut self, sound: bool, around: &RxContext<'_>) -> Result<bool, LaneError> {
        let targets = match self.header.kind {
            Kind::Write => self.targets(around),
            _ => Ok(Targets::default()),
        };
        if self.must_wait(&targets) {
            self.stalled = true;
            return Ok(false);
        }
        self.left = self.header.len;
        self.rest = Stretch::all(&self.descs[..]);
        self.device = None;
        self.state = if self.header.kind.has_trailer() { State::Payload } else { State::Header };
        let op = self.header.op;
        match self.header.kind {
            Kind::Write => self.begin_write(sound, targets, around),
            Kind::Read if !sound => self.answers.ack(op, Status::Checksum),
            Kind::Read => self.asked(around)?,
            Kind::Data => self.begin_data(around)?,
            Kind::Ack => self.acked(around)?,
            Kind::Fence => {
                self.write = None;
                self.answers.ack(op, Status::Cut);
            }
            Kind::Ping => {
                self.answers.frames.push(Header::bare(Kind::Pong, op, 0));
            }
            Kind::Message => self.message.clear(),
            Kind::Pong => {}
            Kind::Stop => self.answers.stopped.push(op),
            Kind::Bye => return Err(LaneError::Closed),
            Kind::Establish => return Err(unexpected("a second establish")),
        }
        Ok(true)
    }

    fn begin_write(
        &mut self,
        sound: bool,
        targets: Result<Targets, AccessError>,
        around: &RxContext<'_>,
    ) {
        let op = self.header.op;
        if self.write.as_ref().is_none_or(|write| write.op != op) {
            self.write = Some(IncomingWrite { op, status: Status::Ok });
        }
        match targets {
            Ok(targets) => self.device = targets.device,
            Err(e) => {
                around.regions.note_refusal();
                self.fail_write(status_of(e));
            }
        }
        if !sound {
            self.fail_write(Status::Checksum);
        }
    }

    /// Begins the peer's read: queues a reply.
    fn asked(&mut self, around: &RxContext<'_>) -> Result<(), LaneError> {
        match self.locate_all(Access::Read, around) {
            Err(e) => {
                around.regions.note_refusal();
                self.answers.ack(self.header.op, status_of(e));
            }
            Ok(targets) => {
                let pieces = std::mem::take(&mut self.descs);
                let is_fetched = targets.device.is_some();
                self.answers.replies.push(Reply::new(self.header.op, pieces, is_fetched));
            }
        }
        Ok(())
    }

    /// Begins a frame with data for a read of ours.
    fn begin_data(&mut self, around: &RxContext<'_>) -> Result<(), LaneError> {
        let name = OpName(self.header.op);
        let mut ops = around.ops.lock();
        let asked = ops.get_mut(name).filter(|op| op.sent == SendProgress::All);
        let Some((len, target)) = asked.and_then(|op| Some((op.len, op.target.take()?))) else {
            return Err(unexpected("data for a read that was not asked"));
        };
        if target.received + self.header.len > len {
            return Err(unexpected("more data than was asked for"));
        }
        self.rest = target.rest;
        self.device = target.device;
        self.read = Some((name, target));
        Ok(())
    }

    /// The peer has ended one of our operations.
    fn acked(&mut self, around: &RxContext<'_>) -> Result<(), LaneError> {
        let name = OpName(self.header.op);
        let status = self.header.status();
        let mut ops = around.ops.lock();
        if ops.get_mut(name).is_some_and(|op| op.sent != SendProgress::All) {
            // A sending thread may have sent its last byte just now.
            drop(ops);
            (around.settle)();
            ops = around.ops.lock();
        }
        match ops.get_mut(name) {
            None => return Err(unexpected("an ack for nothing")),
            // Its memory is still being sent from, so it cannot end.
            Some(op) if op.sent != SendProgress::All => {
                return Err(unexpected("an ack for what has not been sent"));
            }
            Some(op) if op.kind == OpKind::Read && status == Status::Ok => {
                return Err(unexpected("a read that ends without data"));
            }
            Some(_) => {}
        }
        let result = match status {
            Status::Ok => Ok(()),
            Status::Cut => Err(OpError::Cancelled),
            status => Err(OpError::Remote(status)),
        };
        let purpose = Purpose::Read(name);
        if let Some(op) = ops.get_mut(name)
            && self.is_uploading(purpose)
        {
            let Some(target) = op.target.take() else {
                return Err(unexpected("an ack behind the last data of a read"));
            };
            op.doomed = op.doomed.take().or(result.err());
            self.end_after_copies(purpose, End::Data(target));
            return Ok(());
        }
        let Some(op) = ops.remove(name) else { return Ok(()) };
        drop(ops);
        op.done.complete(op.doomed.map_or(result, Err));
        Ok(())
    }
}
