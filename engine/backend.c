// Owns the list of devices this build has.
#include "backend.h"

#include <string.h>

#include "error.h"

static const device *const devices[] = {&device_cpu};

const device *device_find(const char *name) {
    if (!name) return &device_cpu;
    for (size_t i = 0; i < sizeof devices / sizeof *devices; i++)
        if (!strcmp(devices[i]->name, name)) return devices[i];
    fail(MF_ARG, "device \"%.40s\" is unknown to this build; use cpu", name);
    return NULL;
}

const char *device_name(uint32_t id) {
    for (size_t i = 0; i < sizeof devices / sizeof *devices; i++)
        if (devices[i]->id == id) return devices[i]->name;
    return NULL;
}
