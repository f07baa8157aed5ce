/* Preloaded into a peer: puts every TCP socket on one congestion control.
 *
 * Build: gcc -shared -fPIC -O2 -o congestion.so congestion.c -ldl
 * Use:   BENCH_TCP_CONGESTION=cubic BENCH_TCP_CONGESTION_LOG=/path LD_PRELOAD=congestion.so program
 *
 * With BENCH_TCP_CONGESTION set, each TCP socket gets that algorithm when it is made (accepted ones
 * inherit it from their listener), and the program's own later choice is ignored. Without it nothing
 * is changed. With BENCH_TCP_CONGESTION_LOG set, one line is appended for a choice that the program made and
 * was granted ("asked NAME"), for the first socket pinned ("pinned NAME") and for a pin that failed ("failed REASON").
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

typedef int (*socket_fn)(int, int, int);
typedef int (*setsockopt_fn)(int, int, int, const void *, socklen_t);

static atomic_flag pinned_said = ATOMIC_FLAG_INIT;
static atomic_flag failed_said = ATOMIC_FLAG_INIT;

static void say(const char *word, const char *detail) {
    const char *path = getenv("BENCH_TCP_CONGESTION_LOG");
    char line[128];
    int fd, n;
    if (!path)
        return;
    fd = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (fd < 0)
        return;
    n = snprintf(line, sizeof line, "%s %s\n", word, detail);
    if (n > 0 && write(fd, line, n < (int)sizeof line ? (size_t)n : sizeof line - 1) < 0) {
        /* The log is a witness, not a duty: the peer goes on. */
    }
    close(fd);
}

static setsockopt_fn real_setsockopt(void) {
    static setsockopt_fn real;
    if (!real)
        real = (setsockopt_fn)dlsym(RTLD_NEXT, "setsockopt");
    return real;
}

static const char *wanted(void) {
    const char *name = getenv("BENCH_TCP_CONGESTION");
    return name && *name ? name : NULL;
}

int socket(int domain, int type, int protocol) {
    static socket_fn real;
    const char *name = wanted();
    int fd, saved;
    if (!real)
        real = (socket_fn)dlsym(RTLD_NEXT, "socket");
    fd = real(domain, type, protocol);
    if (fd < 0 || !name || (domain != AF_INET && domain != AF_INET6) || (type & 0xf) != SOCK_STREAM ||
        (protocol != 0 && protocol != IPPROTO_TCP))
        return fd;
    saved = errno;
    if (real_setsockopt()(fd, IPPROTO_TCP, TCP_CONGESTION, name, (socklen_t)strlen(name)) == 0) {
        if (!atomic_flag_test_and_set(&pinned_said))
            say("pinned", name);
    } else if (!atomic_flag_test_and_set(&failed_said)) {
        say("failed", strerror(errno));
    }
    errno = saved;
    return fd;
}

int setsockopt(int fd, int level, int option, const void *value, socklen_t len) {
    if (level == IPPROTO_TCP && option == TCP_CONGESTION) {
        char name[32] = {0};
        int result, saved;
        if (wanted())
            return 0;
        result = real_setsockopt()(fd, level, option, value, len);
        saved = errno;
        memcpy(name, value, len < sizeof name ? len : sizeof name - 1);
        if (result == 0)
            say("asked", name);
        errno = saved;
        return result;
    }
    return real_setsockopt()(fd, level, option, value, len);
}
