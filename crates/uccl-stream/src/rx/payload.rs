//! The payload of a frame, and the frame's end.

use uccl_fabric::{
    guarded,
    lane::{Handling, LaneError, OpError},
    mem::Access,
    pipe::PipeRx,
    status_of,
};
use uccl_wire::frame::{Kind, Status, TRAILER_LEN, Trailer};

use super::{IncomingWrite, PendingChange, Rx, RxContext, State, ends::read_result, unexpected};
use crate::{
    remote_of,
    upload::{End, Purpose},
};

impl<P: PipeRx> Rx<P> {
    pub(super) fn step_payload(&mut self, around: &RxContext<'_>) -> Result<bool, LaneError> {
        let have = self.end - self.start;
        if self.left == 0 {
            self.state = State::Trailer;
            self.upload(around);
            return Ok(true);
        }
        if have == 0 {
            return Ok(false);
        }
        let n = (have as u64).min(self.left) as usize;
        if self.header.kind == Kind::Message {
            return self.step_message(n, around);
        }
        let from = self.start;
        let device = self.device_wanting_data();
        let n = match device {
            Some(device) => n.min(self.room_for(device).map_or(0, |room| room.len)),
            None => n,
        };
        if n == 0 {
            return Ok(!self.stalled);
        }
        if let Some(crc) = &mut self.crc {
            crc.add(&self.staging[from..from + n]);
        }
        match self.header.kind {
            _ if device.is_some() => self.place_for_device(from, n),
            Kind::Write => self.place_write(from, n, around),
            _ => self.place_data(from, n),
        }
        self.placed(n);
        self.start += n;
        self.upload_if_full(around);
        Ok(true)
    }

    /// Hands over a message straight from the staging buffer, if it is there in one piece.
    fn step_message(&mut self, n: usize, around: &RxContext<'_>) -> Result<bool, LaneError> {
        let whole = self.message.is_empty() && n as u64 == self.header.len;
        let len = n + TRAILER_LEN;
        if whole && self.end - self.start >= len {
            let bytes = &self.staging[self.start..self.start + len];
            let (payload, trailer) = bytes.split_at(n);
            if let Some(crc) = &mut self.crc {
                crc.add(payload);
            }
            self.start += len;
            self.left = 0;
            self.state = State::Header;
            let Some(trailer) = trailer.first_chunk() else { return Ok(false) };
            let (_, crc_ok) = self.trailer(trailer)?;
            let handling = deliver(crc_ok, payload, around)?;
            self.handled(handling);
            return Ok(true);
        }
        if whole {
            return Ok(false);
        }
        let bytes = &self.staging[self.start..self.start + n];
        if let Some(crc) = &mut self.crc {
            crc.add(bytes);
        }
        self.message.extend_from_slice(bytes);
        self.start += n;
        self.left -= n as u64;
        Ok(true)
    }

    /// Copies payload from the staging buffer into the regions it is for.
    fn place_write(&mut self, from: usize, n: usize, around: &RxContext<'_>) {
        let guard = around.regions.lock();
        let (mut rest, mut done) = (self.rest, 0);
        while done < n && self.write_ok() {
            let Some(desc) = rest.take_first(&self.descs[..], n - done) else { return };
            match guard.check(&remote_of(&desc), Access::Write) {
                Ok(to) => {
                    let bytes = &self.staging[from + done..][..to.len];
                    done += to.len;
                    // SAFETY: inside a region, checked under the lock that is held. The owner may
                    // have unmapped it.
                    if unsafe { guarded::copy_to(to, bytes) }.is_err() {
                        self.fail_write(Status::Fault);
                    }
                }
                Err(e) => self.fail_write(status_of(e)),
            }
        }
    }

    /// Copies payload from the staging buffer into the memory of our read.
    fn place_data(&mut self, from: usize, n: usize) {
        let Some((_, target)) = &mut self.read else { return };
        if target.failed.is_some() {
            return;
        }
        let (spans, mut rest, mut from) = (&target.spans[..], self.rest, from);
        for to in rest.take_parts(spans, n) {
            // SAFETY: the memory of a read stays valid until it has ended, unless the caller has
            // unmapped it.
            if unsafe { guarded::copy_to(to, &self.staging[from..from + to.len]) }.is_err() {
                target.failed = Some(OpError::LocalFault);
                return;
            }
            from += to.len;
        }
    }

    /// Ends a frame, of which the trailer has come.
    pub(super) fn finish(
        &mut self,
        (trailer, crc_ok): (Trailer, bool),
        around: &RxContext<'_>,
    ) -> Result<(), LaneError> {
        match self.header.kind {
            Kind::Write => {
                if trailer.status != Status::Ok {
                    self.fail_write(trailer.status);
                } else if !crc_ok {
                    self.fail_write(Status::Checksum);
                }
                if self.header.last
                    && let Some(IncomingWrite { op, status }) = self.write.take()
                {
                    match self.uploader.is_idle() {
                        true => self.end_write(op, status, self.word, around),
                        false => {
                            self.end_after_copies(Purpose::Write(op), End::Ack(status, self.word));
                        }
                    }
                }
            }
            Kind::Data => self.finish_data(trailer.status, crc_ok, around)?,
            Kind::Message => {
                let message = std::mem::take(&mut self.message);
                let handling = deliver(crc_ok, &message, around)?;
                self.message = message;
                self.handled(handling);
            }
            _ => {}
        }
        Ok(())
    }

    /// Notes how far the handling of the latest message is.
    fn handled(&mut self, handling: Handling) {
        if handling == Handling::UnderWay {
            self.changing = Some(PendingChange::Message);
        }
    }

    fn finish_data(
        &mut self,
        status: Status,
        crc_ok: bool,
        around: &RxContext<'_>,
    ) -> Result<(), LaneError> {
        let Some((name, mut target)) = self.read.take() else { return Ok(()) };
        if status != Status::Ok {
            target.failed.get_or_insert(OpError::Remote(status));
        } else if !crc_ok {
            target.failed.get_or_insert(OpError::Checksum);
        }
        let mut ops = around.ops.lock();
        if !self.header.last {
            if let Some(op) = ops.get_mut(name) {
                target.rest = self.rest;
                op.target = Some(target);
            }
            return Ok(());
        }
        if target.device.is_some() && !self.uploader.is_idle() {
            self.end_after_copies(Purpose::Read(name), End::Data(target));
            return Ok(());
        }
        let Some(op) = ops.remove(name) else { return Ok(()) };
        drop(ops);
        let result = read_result(&op, &target);
        op.done.complete(result);
        Ok(())
    }
}

fn deliver(crc_ok: bool, message: &[u8], around: &RxContext<'_>) -> Result<Handling, LaneError> {
    if !crc_ok {
        return Err(unexpected("a message with a wrong checksum"));
    }
    around.sink.message(message).map_err(LaneError::Protocol)
}
