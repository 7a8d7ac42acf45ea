/* The power button ends the guest. */
#include "guestload.h"

#include <dirent.h>
#include <fcntl.h>
#include <linux/input.h>
#include <net/if.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/reboot.h>
#include <sys/socket.h>
#include <unistd.h>

/* Linux 6.1.192 resets virtio devices as it powers off, and waits for ever for a network card's answer after that. */
static void links_down(void)
{
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    struct if_nameindex *all = if_nameindex();
    for (struct if_nameindex *one = all; one && one->if_index; one++) {
        struct ifreq link = {0};
        strncpy(link.ifr_name, one->if_name, IFNAMSIZ - 1);
        if (ioctl(fd, SIOCGIFFLAGS, &link) == 0) {
            link.ifr_flags &= ~IFF_UP;
            ioctl(fd, SIOCSIFFLAGS, &link);
        }
    }
    if_freenameindex(all);
    close(fd);
}

static void *watch_buttons(void *unused)
{
    (void)unused;
    struct pollfd fds[32];
    nfds_t count = 0;
    DIR *devices = opendir("/dev/input");
    for (struct dirent *entry; devices && count < 32 && (entry = readdir(devices));) {
        char path[300];
        snprintf(path, sizeof path, "/dev/input/%s", entry->d_name);
        int fd = entry->d_name[0] == 'e' ? open(path, O_RDONLY | O_CLOEXEC) : -1;
        if (fd >= 0)
            fds[count++] = (struct pollfd){fd, POLLIN, 0};
    }
    if (devices)
        closedir(devices);
    while (poll(fds, count, -1) > 0) {
        for (nfds_t i = 0; i < count; i++) {
            struct input_event event;
            if (fds[i].revents & (POLLERR | POLLHUP))
                fds[i].fd = -1;
            else if (!(fds[i].revents & POLLIN) || read(fds[i].fd, &event, sizeof event) != sizeof event)
                continue;
            else if (event.type == EV_KEY && event.code == KEY_POWER && event.value == 1) {
                printf("VK-OFF power button\n");
                sync();
                links_down();
                reboot(RB_POWER_OFF);
            }
        }
    }
    return NULL;
}

void button_start(void)
{
    start_thread(watch_buttons, NULL);
}
