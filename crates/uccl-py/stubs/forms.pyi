# Forms of calls that one signature cannot say, in place of it in python/uccl/_core.pyi.
# `stubtest` holds their names and defaults against the module.
class Endpoint:
    @overload
    def connect(
        self,
        remote_ip_addr: str,
        remote_gpu_idx: int | str | None = None,
        remote_port: int | None = None,
        *,
        timeout: float | None = None,
    ) -> tuple[bool, int]: ...
    @overload
    def connect(
        self,
        remote_ip_addr: str,
        *,
        remote_gpu_bdf: str,
        remote_port: int | None = None,
        timeout: float | None = None,
    ) -> tuple[bool, int]: ...
    @overload
    def connect_local(
        self, remote_gpu_idx: int | str, *, timeout: float | None = None
    ) -> tuple[bool, int]: ...
    @overload
    def connect_local(
        self, *, remote_gpu_bdf: str, timeout: float | None = None
    ) -> tuple[bool, int]: ...
    @overload
    def reg(self, ptr: SupportsIndex, size: int, floatType: int | None = None) -> tuple[bool, int]: ...
    @overload
    def reg(
        self, ptr: _Memory, size: int | None = None, floatType: int | None = None
    ) -> tuple[bool, int]: ...
    @overload
    def advertise(self, mr_id: int, ptr: SupportsIndex, size: int) -> tuple[bool, bytes]: ...
    @overload
    def advertise(
        self, mr_id: int, ptr: _Memory, size: int | None = None
    ) -> tuple[bool, bytes]: ...
    @overload
    def advertise(
        self, conn_id: int, mr_id: int, ptr: _Pointer, size: int | None = None
    ) -> tuple[bool, bytes]: ...
    @overload
    def advertise(
        self, conn_id: int, mr_id: int, ptr: _Pointer, size: int | None, out_buf: Buffer
    ) -> bool: ...
    @overload
    def advertisev(
        self,
        mr_id_v: _Ids,
        ptr_v: _Pointers,
        size_v: _Sizes | None = None,
        num_iovs: int | None = None,
    ) -> tuple[bool, list[bytes]]: ...
    @overload
    def advertisev(
        self,
        conn_id: int,
        mr_id_v: _Ids,
        ptr_v: _Pointers,
        size_v: _Sizes | None = None,
        num_iovs: int | None = None,
    ) -> tuple[bool, list[bytes]]: ...
    @overload
    def advertisev(
        self,
        conn_id: int,
        mr_id_v: _Ids,
        ptr_v: _Pointers,
        size_v: _Sizes | None,
        out_buf_list: _Blobs,
        num_iovs: int | None = None,
    ) -> bool: ...
    @overload
    def advertise(self, mr_id: int, ptr: _Pointer, size: int | None, out_buf: Buffer) -> bool: ...
    @overload
    def advertisev(
        self,
        mr_id_v: _Ids,
        ptr_v: _Pointers,
        size_v: _Sizes | None = None,
        num_iovs: int | None = None,
        *,
        out_buf_list: _Blobs,
    ) -> bool: ...
