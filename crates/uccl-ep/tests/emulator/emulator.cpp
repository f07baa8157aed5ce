// Runs the kernels of expert parallelism on a CPU. All threads of a launch take turns on the thread that calls it, so
// blocks that wait for each other, and launches on other threads, get on.

#include <sched.h>
#include <setjmp.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <ucontext.h>

#include <memory>
#include <vector>

#include "../../../../kernels/ep/ep.cu"

namespace {

constexpr size_t STACK = 64 << 10;

struct Warp {
  u64 values[32];
  u32 given = 0, seen = 0;
  u32 rounds = 0;
};

struct Block {
  std::vector<Warp> warps;
  std::unique_ptr<char[]> shared;
  u32 waiting = 0, left, rounds = 0;
};

struct Thread {
  u32 thread, block;
  jmp_buf at;
  bool has_begun = false, is_over = false;
};

struct Launch {
  u32 blocks, threads;
  const void* parameter;
  void (*kernel)(const void*);
  std::vector<Block> all_blocks;
  std::vector<Thread> all_threads;
  char* stacks;
  Thread* running = nullptr;
  jmp_buf scheduler;
  bool polls = false;    // in this round of turns a thread has polled
  bool gets_on = false;  // in this round threads of a block or a warp have met
  u32 idle = 0;          // rounds in which all remaining threads polled in vain
};

thread_local Launch* launch;

void begin() {
  Thread* me = launch->running;
  launch->kernel(launch->parameter);
  me->is_over = true;
  launch->all_blocks[me->block].left--;
  _longjmp(launch->scheduler, 1);
}

void give_turn(Launch& l, size_t i) {
  Thread& thread = l.all_threads[i];
  l.running = &thread;
  if (_setjmp(l.scheduler) != 0) return;
  if (thread.has_begun) _longjmp(thread.at, 1);
  thread.has_begun = true;
  ucontext_t context;
  getcontext(&context);
  context.uc_stack.ss_sp = l.stacks + i * STACK;
  context.uc_stack.ss_size = STACK;
  context.uc_link = nullptr;
  makecontext(&context, begin, 0);
  setcontext(&context);
}

// Rounds of turns without work before a launch sleeps.
constexpr u32 SPINS = 16;

// Lets other launches run if this one waits for them. On a busy machine a yield takes as long as other programs have the processor, so
// there is none while threads get on, and one that waits for long sleeps.
void rest(Launch& l) {
  bool waits = l.polls && !l.gets_on;
  l.polls = l.gets_on = false;
  l.idle = waits ? l.idle + 1 : 0;
  if (!waits) return;
  if (l.idle < SPINS) {
    sched_yield();
    return;
  }
  timespec nap = {0, 50000};
  nanosleep(&nap, nullptr);
}

Thread& self() { return *launch->running; }
Block& own_block() { return launch->all_blocks[self().block]; }

// The most threads of a block that take turns: kernels work with any number of warps, and fewer give their turns away less often.
constexpr u32 MOST_THREADS = 256;

void run(u32 blocks, u32 asked, const void* parameter, void (*kernel)(const void*)) {
  u32 threads = asked < MOST_THREADS ? asked : MOST_THREADS;
  Launch l;
  l.blocks = blocks, l.threads = threads, l.parameter = parameter, l.kernel = kernel;
  l.all_blocks.resize(blocks);
  l.all_threads.resize(size_t{blocks} * threads);
  for (Block& block : l.all_blocks) block.warps.resize(threads / 32), block.left = threads;
  for (size_t i = 0; i < l.all_threads.size(); i++) {
    l.all_threads[i].thread = static_cast<u32>(i % threads);
    l.all_threads[i].block = static_cast<u32>(i / threads);
  }
  size_t len = l.all_threads.size() * STACK;
  l.stacks = static_cast<char*>(
      mmap(nullptr, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (l.stacks == MAP_FAILED) abort();
  launch = &l;
  for (bool is_over = false; !is_over;) {
    is_over = true;
    for (size_t i = 0; i < l.all_threads.size(); i++) {
      if (l.all_threads[i].is_over) continue;
      is_over = false;
      give_turn(l, i);
    }
    rest(l);
  }
  launch = nullptr;
  munmap(l.stacks, len);
}

template <typename Parameter, void (*KERNEL)(Parameter)>
void kernel(const void* parameter) {
  KERNEL(*static_cast<const Parameter*>(parameter));
}

// Pushes to a ring of commands, as all kernels of a rank together do.
struct Pusher {
  UcclEpAddresses addresses = {};
  UcclEpGroup group = {};
  UcclEpOwnState own = {};
  UcclEpStatus status = {};
  u32 each = 0;   // commands of a thread
  u32 state = 0;  // the state of a thread that could not push
};

void push_each(const void* parameter) {
  Pusher& pusher = **static_cast<Pusher* const*>(parameter);
  u64 thread = blockIdx.x * blockDim.x + threadIdx.x;
  for (u32 i = 0; i < pusher.each && pusher.state == 0; i++) {
    // Lanes have nothing now and then, each at another time.
    bool has = (thread + i) % 5 != 0;
    u32 state = push(pusher.group, has, {thread << 32 | i, thread << 32 | i});
    if (has && state != 0) pusher.state = state;
    __syncwarp();
  }
}

}  // namespace

namespace emulated {

Place thread() { return {self().thread}; }
Place block() { return {self().block}; }
Place threads() { return {launch->threads}; }
Place blocks() { return {launch->blocks}; }

void* shared(size_t len) {
  Block& block = own_block();
  // Memory that no thread has written to has any contents.
  if (!block.shared) {
    block.shared.reset(new char[len]);
    memset(block.shared.get(), 0xa5, len);
  }
  return block.shared.get();
}

void relax() {
  launch->polls = true;
  turn();
}

void turn() {
  if (_setjmp(self().at) == 0) _longjmp(launch->scheduler, 1);
}

void wait_for_block() {
  Block& block = own_block();
  u32 round = block.rounds;
  if (++block.waiting == block.left) {
    block.waiting = 0;
    block.rounds++;
    launch->gets_on = true;
    return;
  }
  while (block.rounds == round) turn();
}

// A value is there until every lane has seen all.
const u64* exchange(u64 value) {
  Warp& warp = own_block().warps[self().thread / 32];
  u32 round = warp.rounds;
  warp.values[self().thread % 32] = value;
  if (++warp.given == 32) {
    warp.given = 0;
    warp.rounds++;
    launch->gets_on = true;
  }
  while (warp.rounds == round) turn();
  return warp.values;
}

void exchanged() {
  Warp& warp = own_block().warps[self().thread / 32];
  u32 round = warp.rounds;
  if (++warp.seen == 32) {
    warp.seen = 0;
    warp.rounds++;
    launch->gets_on = true;
  }
  while (warp.rounds == round) turn();
}

}  // namespace emulated

struct Emulated {
  const char* name;
  size_t len;
  void (*kernel)(const void*);
};

extern "C" {

extern const Emulated emulated_kernels[];
const Emulated emulated_kernels[] = {
    {"uccl_ep_low_latency_send", sizeof(UcclEpSend), kernel<const UcclEpSend, uccl_ep_low_latency_send>},
    {"uccl_ep_low_latency_receive", sizeof(UcclEpLowLatencyReceive),
     kernel<const UcclEpLowLatencyReceive, uccl_ep_low_latency_receive>},
    {"uccl_ep_low_latency_return", sizeof(UcclEpLowLatencyReturn),
     kernel<const UcclEpLowLatencyReturn, uccl_ep_low_latency_return>},
    {"uccl_ep_low_latency_sum", sizeof(UcclEpLowLatencySum),
     kernel<const UcclEpLowLatencySum, uccl_ep_low_latency_sum>},
    {"uccl_ep_low_latency_return_packed", sizeof(UcclEpLowLatencyReturn),
     kernel<const UcclEpLowLatencyReturn, uccl_ep_low_latency_return_packed>},
    {"uccl_ep_low_latency_sum_packed", sizeof(UcclEpLowLatencySum),
     kernel<const UcclEpLowLatencySum, uccl_ep_low_latency_sum_packed>},
    {"uccl_ep_low_latency_dispatch", sizeof(UcclEpLowLatencyDispatch),
     kernel<const UcclEpLowLatencyDispatch, uccl_ep_low_latency_dispatch>},
    {"uccl_ep_low_latency_combine", sizeof(UcclEpLowLatencyCombine),
     kernel<const UcclEpLowLatencyCombine, uccl_ep_low_latency_combine>},
    {"uccl_ep_mask", sizeof(UcclEpMask), kernel<const UcclEpMask, uccl_ep_mask>},
    {"uccl_ep_layout", sizeof(UcclEpLayout), kernel<const UcclEpLayout, uccl_ep_layout>},
    {"uccl_ep_normal_send", sizeof(UcclEpNormalSend), kernel<const UcclEpNormalSend, uccl_ep_normal_send>},
    {"uccl_ep_normal_count", sizeof(UcclEpNormalCount), kernel<const UcclEpNormalCount, uccl_ep_normal_count>},
    {"uccl_ep_normal_receive", sizeof(UcclEpNormalReceive), kernel<const UcclEpNormalReceive, uccl_ep_normal_receive>},
    {"uccl_ep_normal_return", sizeof(UcclEpNormalReturn), kernel<const UcclEpNormalReturn, uccl_ep_normal_return>},
    {"uccl_ep_normal_sum", sizeof(UcclEpNormalSum), kernel<const UcclEpNormalSum, uccl_ep_normal_sum>},
    {"uccl_ep_normal_dispatch", sizeof(UcclEpNormalDispatch),
     kernel<const UcclEpNormalDispatch, uccl_ep_normal_dispatch>},
    {"uccl_ep_normal_combine", sizeof(UcclEpNormalCombine), kernel<const UcclEpNormalCombine, uccl_ep_normal_combine>},
    {nullptr, 0, nullptr},
};

Pusher* emulated_pusher(u64 ring, u32 slots, u64 timeout_ns) {
  Pusher* pusher = new Pusher;
  pusher->group.own = reinterpret_cast<u64>(&pusher->own);
  pusher->group.status = reinterpret_cast<u64>(&pusher->status);
  pusher->group.addresses = reinterpret_cast<u64>(&pusher->addresses);
  pusher->addresses.ring = ring;
  pusher->addresses.ring_slots = slots;
  pusher->group.timeout_ns = timeout_ns;
  return pusher;
}

// Makes each thread of a launch push `each` commands; returns the state of one that could not.
u32 emulated_push(Pusher* pusher, u32 blocks, u32 threads, u32 each) {
  pusher->each = each;
  pusher->state = 0;
  run(blocks, threads, &pusher, push_each);
  return pusher->state;
}

// The call number in a weight that is read as a call's count.
u64 emulated_call_of_weight(u64 call, float weight) { return tagged_weight(call, weight) >> FLAG_CALL; }

void emulated_poison(Pusher* pusher, u32 poison) { __atomic_store_n(&pusher->status.poison, poison, __ATOMIC_RELAXED); }

void emulated_pusher_free(Pusher* pusher) { delete pusher; }

void emulate(void (*kernel)(const void*), u32 blocks, u32 threads, const void* parameter) {
  run(blocks, threads, parameter, kernel);
}
}
