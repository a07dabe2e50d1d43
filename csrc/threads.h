// Work shared out over threads: those of the process's OpenMP runtime where it has one, else threads of our own.
//
// torch computes on a team of OpenMP threads, which keep spinning for a while after each of its operations: a thread of
// ours would have to share a processor with one of them. The runtime is not linked but looked up, so that we join the
// one that is there and need none where there is none.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>
#if !defined(_WIN32)
#include <dlfcn.h>
#endif
#if defined(__linux__) && defined(__GLIBC__) && defined(__x86_64__)
// glibc 2.34 moved it from libdl to libc under a new version; under the old one every glibc has it
__asm__(".symver dlsym, dlsym@GLIBC_2.2.5");
#endif

namespace quark {

// GCC's entry, which the runtimes of LLVM and Intel have too: every thread of a team calls `run(data)`. No thread
// count, 0, asks for the team that the runtime's owner has set.
typedef void (*OpenMpParallel)(void (*run)(void*), void* data, unsigned threads, unsigned flags);

inline OpenMpParallel find_open_mp() {
#if defined(_WIN32)
  return nullptr;
#else
  return reinterpret_cast<OpenMpParallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
#endif
}

// Hands the numbers of workers out one by one to the threads that ask for them.
template <class Share>
struct Tickets {
  const Share& share;
  const int64_t workers;
  std::atomic<int64_t> next{0};

  static void take(void* data) {
    Tickets& tickets = *static_cast<Tickets*>(data);
    for (int64_t worker; (worker = tickets.next++) < tickets.workers;) tickets.share(worker);
  }
};

// Calls share(worker) once for each worker below `workers`, in any order, on this thread and on threads of our own;
// share must not throw. A thread that cannot be had, for want of memory or because the system refuses it, leaves its
// work to the others: destroying the ones that did start without joining them would end the process.
template <class Share>
void run_on_own_threads(int64_t workers, const Share& share) {
  Tickets<Share> tickets{share, workers};
  std::vector<std::thread> others;
  try {
    others.reserve(static_cast<size_t>(workers));
    for (int64_t worker = 1; worker < workers; ++worker) others.emplace_back(Tickets<Share>::take, &tickets);
  } catch (const std::exception&) {
    // std::system_error or std::bad_alloc; the tickets that are left are taken below
  }
  Tickets<Share>::take(&tickets);
  for (std::thread& other : others) other.join();
}

// The same on the OpenMP team of the process, if it has one. The team may have fewer threads than there are workers.
template <class Share>
void run_in_parallel(int64_t workers, const Share& share) {
  const OpenMpParallel open_mp = workers > 1 ? find_open_mp() : nullptr;
  if (open_mp == nullptr) return run_on_own_threads(workers, share);
  Tickets<Share> tickets{share, workers};
  open_mp(Tickets<Share>::take, &tickets, 0, 0);
}

}  // namespace quark
